"""Silent divergence: whether tensors that should be the same on several ranks are.

The courier has a checksum of every block it sent; one number made of them is compared by one small allreduce.
Only where it differs is each tensor looked at by itself, and those that differ are named, once. A faulty device
that computes wrong numbers without a word is found in this way, and so is a forgotten allreduce.
"""

from __future__ import annotations

import collections
import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from .comm import World
from .errors import ConfigError, MlflashError
from .layout import Layout
from .slot import Slot
from .stage import Plan
from .state import Entry

log = logging.getLogger("mlflash")

_NAMED = 8  # tensors named in a warning
_POSITIVE = (1 << 62) - 1


def members_of(replicated: Any, world: World) -> list[int]:
    """The ranks that hold the same state as this one, ascending. Not collective; nothing is sent over a given group.

    Args:
        replicated: an mpi4py communicator or group, a torch.distributed process group, ranks, or True for all.
        world: the communicators.

    Raises:
        ConfigError: it is none of these, or this rank is not in it.
    """
    if replicated is True:
        return list(range(world.size))
    torch = sys.modules.get("torch")
    if world.world is not None and (hasattr(replicated, "Get_group") or hasattr(replicated, "Translate_ranks")):
        group = replicated.Get_group() if hasattr(replicated, "Get_group") else replicated
        ranks = world.mpi.Group.Translate_ranks(group, list(range(group.size)), world.world.Get_group())
    elif (
        torch is not None
        and torch.distributed.is_available()
        and isinstance(replicated, torch.distributed.ProcessGroup)
    ):
        ranks = torch.distributed.get_process_group_ranks(replicated)
    elif isinstance(replicated, Sequence) and all(isinstance(rank, int) for rank in replicated):
        ranks = replicated
    else:
        ranks = ()
    members = sorted({int(rank) for rank in ranks})
    if world.rank not in members or not 0 <= members[0] <= members[-1] < world.size:
        raise ConfigError(
            "replicated= must say which ranks hold the same state as this one",
            expected=f"a communicator, process group or list of ranks below {world.size}, with rank {world.rank} in it",
            found=repr(replicated),
        )
    return members


class Replicas:
    """Compares what the ranks of a group have saved.

    Collective over the world.

    Args:
        world: the communicators.
        replicated: see `members_of`.

    Raises:
        ConfigError: on all ranks, where the ranks do not name each other.
    """

    def __init__(self, world: World, replicated: Any):
        self._world = world
        error: MlflashError | None = None
        self.members = [world.rank]
        try:
            self.members = members_of(replicated, world)
        except MlflashError as problem:
            problem.rank, problem.node = world.rank, world.node_name
            error = problem
        world.raise_together(error)
        named = world.gather(self.members)
        if any(named[rank] != self.members for rank in self.members):
            error = ConfigError("replicated= differs between ranks that name each other", rank=world.rank,
                                expected=f"ranks {self.members} on each of them", found=str(named))  # fmt: skip
        world.raise_together(error)
        self._comm = world.split(min(self.members))
        self._apart: set[str] = set()  # tensors not compared: private, not on all ranks, or reported already
        self._blocks: tuple[Layout, np.ndarray, list[tuple[int, int]]] | None = None

    def free(self) -> None:
        """Free the communicator. Collective over the world."""
        if self._comm is not None:
            self._comm.Free()

    def compare(self, slot: Slot, plan: Plan, step: int) -> int:
        """Compare a committed slot with those of the other ranks, and warn of what differs for the first time.

        Collective over the group: one allreduce of two numbers, as a rule.

        Args:
            slot: the committed slot.
            plan: what is in it.
            step: named in the warning.

        Returns:
            How many tensors of this rank were found to differ.
        """
        if len(self.members) == 1:
            return 0
        self._world.waiting_for = [rank for rank in self.members if rank != self._world.rank]
        layout = plan.layout
        if not plan.private <= self._apart:
            self._apart |= plan.private
            self._blocks = None
        mine = self._one_number(slot, layout)
        low, high = self._world.agree([mine, -mine], self._comm)
        differing = 0 if low == -high else self._compare_each(slot, layout, step)
        self._world.waiting_for = ()
        return differing

    def _one_number(self, slot: Slot, layout: Layout) -> int:
        if self._blocks is None or self._blocks[0] is not layout:
            self._blocks = (layout, *whole_blocks(layout, self._apart))
        _, blocks, pieces = self._blocks
        body = slot.body(layout.extents)
        sums = [xxhash.xxh3_64_intdigest(body[start:end].data) for start, end in pieces]
        known = np.concatenate([slot.table(layout.extents)[blocks], np.array(sums, dtype="<u8")])
        return xxhash.xxh3_64_intdigest(known.tobytes()) & _POSITIVE

    def _compare_each(self, slot: Slot, layout: Layout, step: int) -> int:
        payload = slot.payload(layout.extents)
        mine = {}
        names = {}
        for entry in layout.entries:
            if entry.nbytes and entry.name not in self._apart:
                key = _key(entry)
                names[key] = entry.name
                mine[key] = xxhash.xxh3_64_intdigest(payload[entry.start : entry.start + entry.nbytes].data)
        table = np.array(list(mine.items()), dtype="<u8").reshape(-1, 2)
        holders: dict[int, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        for rank, theirs in zip(self.members, self._world.gather(table, self._comm), strict=True):
            for key, digest in theirs.tolist():
                holders[key][digest].append(rank)
        differ = {names[key]: list(holders[key].values()) for key in mine if len(holders[key]) > 1}
        alone = {names[key] for key in mine if sum(map(len, holders[key].values())) < len(self.members)}
        self._apart |= alone | differ.keys()
        self._blocks = None
        self._warn(differ, step)
        return len(differ)

    def _warn(self, differ: dict[str, list[list[int]]], step: int) -> None:
        # Each tensor is named by the first rank that holds it.
        told = {name: parties for name, parties in differ.items() if min(map(min, parties)) == self._world.rank}
        if told:
            texts = [f"{name} ({_parties(parties)})" for name, parties in list(told.items())[:_NAMED]]
            more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
            log.warning(
                "step %d is not the same on ranks %s, though it should be: %s%s. A device may compute wrongly, or the "
                "ranks do not exchange what they should; what differs on purpose need not worry you, and is named once",
                step, _listed(self.members), ", ".join(texts), more,
            )  # fmt: skip


def whole_blocks(layout: Layout, apart: set[str]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The blocks whose checksums can be compared as they are, and the pieces of the body beside them.

    Args:
        layout: of the slot.
        apart: names of tensors that are not compared; nor is the manifest.

    Returns:
        Block numbers, ascending, and ``(start, end)`` in bytes of the body.
    """
    extents = layout.extents
    room, size = extents.manifest_room, extents.block_nbytes
    usable = np.ones(extents.blocks, dtype=bool)
    usable[: -(-room // size)] = False
    compared = []
    for entry in layout.entries:
        start, end = room + entry.start, room + entry.start + entry.nbytes
        if entry.name in apart:
            usable[start // size : -(-end // size)] = False
        elif entry.nbytes:
            compared.append((start, end))
    pieces = []
    for start, end in sorted(set(compared)):  # tied tensors share their bytes
        for block in range(start // size, -(-end // size)):
            if not usable[block]:
                pieces.append((max(start, block * size), min(end, (block + 1) * size)))
    return np.flatnonzero(usable), pieces


def _key(entry: Entry) -> int:
    same = (entry.name, entry.kind, entry.dtype, entry.global_shape, entry.offset, entry.shape)
    return xxhash.xxh3_64_intdigest(repr(same).encode())


def _parties(parties: list[list[int]]) -> str:
    """Say who differs from whom: the fewer from the more."""
    usual = max(parties, key=lambda ranks: (len(ranks), -min(ranks)))
    odd = sorted(rank for ranks in parties if ranks is not usual for rank in ranks)
    who = f"ranks {_listed(odd)} differ" if len(odd) > 1 else f"rank {odd[0]} differs"
    return f"{who} from {_listed(usual)}"


def _listed(ranks: list[int]) -> str:
    """``_listed([0, 1, 2, 5]) == "0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
