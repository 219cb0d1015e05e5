"""The ranks of a process group, with a Checkpointer and a gloo group of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any

import torch.distributed as dist

from mlflash import Checkpointer
from mlflash.errors import WorldMismatch
from mlflash.mpi.world import find_comm

from ..dcp import MemoryReader, MemoryWriter


@dataclasses.dataclass
class Group:
    """Ranks that save and load together.

    Attributes:
        ranks: of the world, in the order of the process group.
        process_group: of these ranks.
        planning, status: groups of theirs: what one thread uses another must not, and training none of them.
    """

    ranks: tuple[int, ...]
    process_group: Any
    planning: Any
    status: Any

    @staticmethod
    def of(process_group: Any) -> Group:
        """Make one. Collective over the process group; None is the default group."""
        ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        every = ranks == tuple(range(dist.get_world_size()))
        options = {} if every else {"ranks": list(ranks), "use_local_synchronization": True}
        return Group(
            ranks, process_group or dist.group.WORLD, *(dist.new_group(backend="gloo", **options) for _ in range(2))
        )

    def coordinator(self, rank: int | None) -> int:
        """The place in the group of a rank of the world; None: of the lowest one.

        Raises:
            WorldMismatch: it is not in the group.
        """
        wanted = min(self.ranks) if rank is None else rank
        if wanted not in self.ranks:
            raise WorldMismatch("the coordinator is not in the process group", expected=f"one of {self.ranks}",
                                found=str(rank))  # fmt: skip
        return self.ranks.index(wanted)


class Member:
    """A Checkpointer of one group, for one thing that is saved.

    Collective over the group.

    Args:
        group: its ranks.
        job: name in memory.
        settings: of the Checkpointer.
    """

    def __init__(self, group: Group, job: str, settings: dict[str, Any]):
        world = find_comm(os.environ)
        comm = world
        if world is not None and group.ranks != tuple(range(world.size)):
            tag = int.from_bytes(hashlib.sha256(job.encode()).digest()[:2], "little") % 32_767
            comm = world.Create_group(world.Get_group().Incl(group.ranks), tag)
        self._own = comm if comm is not world else None
        self.checkpointer = Checkpointer(job=job, comm=comm, process_group=group.process_group, **settings)
        self.writer, self.reader = MemoryWriter(self.checkpointer), MemoryReader(self.checkpointer)

    def close(self) -> None:
        """Wait for its saves and close it. Collective over the group."""
        own, self._own = self._own, None
        try:
            self.checkpointer.close()
        finally:
            if own is not None:
                own.Free()
