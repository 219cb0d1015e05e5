"""The ranks that compute each other's micro-batches: which rank computes for which, and how they exchange data.

They use gloo, in a group of their own.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist


class Ring:
    """The ranks of a process group as a ring, in the order of the group.

    Collective over the group.

    Args:
        group: ranks that hold the same model and compute different batches. None: the default group.
        seed: seed for the order of the distances.

    Example:
        With 4 ranks and distance 3, rank 0 computes the batch of rank 1, and rank 3 computes that of rank 0.
    """

    def __init__(self, group: Any, seed: int):
        self.ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        every = self.ranks == tuple(range(dist.get_world_size()))
        of_some = {} if every else {"ranks": list(self.ranks), "use_local_synchronization": True}
        self._group = dist.new_group(backend="gloo", **of_some)
        self.place = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self._distances = list(range(1, self.size))
        random.Random(seed).shuffle(self._distances)

    def distances(self, number: int) -> tuple[int, int]:
        """Give the distances from a rank to its first and its second witness in a replay.

        Each of ``size - 1`` successive replays has another first distance, so that every rank checks every other. With
        two ranks both distances are the same, and with one rank both are 0.

        Args:
            number: number of the replay.
        """
        if not self._distances:
            return 0, 0
        return self._distances[number % (self.size - 1)], self._distances[(number + 1) % (self.size - 1)]

    def rank_at(self, distance: int) -> int:
        """Give the rank of the world at this distance after this one. Not collective."""
        rank: int = self.ranks[(self.place + distance) % self.size]
        return rank

    def tell(self, mine: Any) -> list[Any]:
        """Gather a value from each rank of the group, in its order, on all of them. Collective over the group."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self._group)
        return said

    def pass_on(self, content: bytes, distance: int) -> bytes:
        """Send bytes to the rank at this distance, and receive from the rank at the same distance before this one.

        Collective over the group.
        """
        if distance % self.size == 0:
            return content
        length = torch.tensor([len(content)])
        coming = self._exchange(length, torch.zeros(1, dtype=torch.int64), distance)
        room = torch.empty(int(coming.item()), dtype=torch.uint8)
        self._exchange(torch.frombuffer(bytearray(content), dtype=torch.uint8), room, distance)
        return bytes(room.numpy())

    def _exchange(self, content: torch.Tensor, room: torch.Tensor, distance: int) -> torch.Tensor:
        sent = dist.isend(content, self.rank_at(distance), group=self._group)
        got = dist.irecv(room, self.rank_at(-distance), group=self._group)
        for work in (sent, got):
            if work is not None:
                work.wait()
        return room
