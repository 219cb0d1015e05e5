"""Ranks that hold the same tensors: what they may share, and whether it is still the same.

If each rank stores all of its own, the courier has a checksum of every block it sent; one number made from them is
compared by one small allreduce. If they share (see `deduplication`), each has checksums of everything that is shared,
and a step on which they do not agree is not committed. Only if a number differs, each tensor is compared separately;
those that differ are named, once, and not shared any more. This finds a faulty device that silently computes wrong
numbers, and a forgotten allreduce.
"""

from __future__ import annotations

import collections
import fnmatch
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import xxhash

from ..errors import ConfigError, MlflashError, SaveFailed
from ..memory.slot import Slot
from ..mpi.world import World
from ..state.layout import Layout
from ..text import listed, named, ranges
from . import deduplication
from .deduplication import Plan, ShareableLeaf, key_of

log = logging.getLogger("mlflash")

_NAMED = 8  # tensors named in a warning
_POSITIVE = (1 << 62) - 1


class ReplicatedTensors:
    """Knows what the ranks of a group hold alike, and compares it.

    Collective over the world.

    Args:
        members: the ranks that hold the same state as this one, ascending.
        patterns: of the names of what they hold alike.
        placed: only those tensors are alike that are DTensors replicated on these ranks by their placements.

    Raises:
        ConfigError: on all ranks, if the ranks do not name each other.
    """

    def __init__(self, world: World, members: Sequence[int], patterns: Sequence[str] = ("*",), placed: bool = False):
        self._world, self._placed = world, placed
        self.members = list(members)
        own = (self.members[0], len(self.members), xxhash.xxh3_64_intdigest(repr(self.members).encode()))
        given = world.gather(own)
        error: MlflashError | None = None
        if any(given[rank] != own for rank in self.members):
            error = ConfigError("replicated= differs between ranks that name each other", rank=world.rank,
                                expected=f"{named(self.members)} on each of them")  # fmt: skip
        world.raise_together(error)
        self._patterns = tuple(patterns)
        self._comm = world.split(min(self.members))
        self._apart: set[str] = set()  # tensors not compared: private, not on all ranks, or reported already
        self._blocks: tuple[Layout, np.ndarray, list[tuple[int, int]]] | None = None
        self.agreed: frozenset[int] = frozenset()  # keys of the leaves that all members hold alike
        self._provisional = False
        self.sharing: deduplication.Sharing | None = None  # how they share it; None: each stores all of its own
        # for each rank of the world that shares state, the set and the number of its share
        self.shares: dict[int, deduplication.Share] = {}
        # diverged: how many tensors were found to differ
        # version: grows when less is shared than before
        self.version = self.diverged = 0
        self.differed_at: int | None = None  # the newest step at which any did; None: none has

    def share(self, losses: int) -> None:
        """Share what is held alike, if the copies are on more nodes than may be lost. Collective over the world."""
        world = self._world
        self.sharing = deduplication.find(world.topology, self.members, world.rank, losses)
        own = None if self.sharing is None else (self.sharing.by, self.sharing.share)
        self.shares = {rank: share for rank, share in enumerate(world.gather(own)) if share is not None}

    def free(self) -> None:
        if self._comm is not None:
            self._world.drop(self._comm)

    def settle(self, leaves: Sequence[ShareableLeaf] | None, digests: Callable[[Collection[int]], Mapping[int, int]],
               able: bool = True, step: int | None = None) -> bool:  # fmt: skip
        """Agree on what all members have alike, and share it; whether that is settled. Collective over the group.

        Args:
            leaves: of a structure that was not settled before; None: there is nothing new on this rank.
            able: False: this rank has no state, so that nothing can be settled.
            step: named in a warning about what differs. None: it is settled again before the first save, because ranks
                may still get the same values.
        """
        if self._world.all_of(leaves is None, self._comm):
            return True
        if self._provisional:
            self.agreed = frozenset()
        self._provisional = step is None
        names = {leaf.key: leaf.name for leaf in leaves or () if self._may_share(leaf) and leaf.key not in self.agreed}
        checks = digests(names.keys()) if names else {}
        settled = self._world.all_of(able, self._comm)
        alike, others = self._sort_out(checks)
        self.agreed |= alike
        if step is not None:
            differ = _differing(names, others)
            self._apart |= differ.keys()
            self._warn(differ, step)
        return settled

    def _may_share(self, leaf: ShareableLeaf) -> bool:
        if leaf.name in self._apart:
            return False
        if self._placed:
            return leaf.replicas is not None and leaf.replicas == tuple(self.members)
        return any(fnmatch.fnmatchcase(leaf.name, pattern) for pattern in self._patterns)

    def confirm(self, plan: Plan | None, checks: Mapping[int, int] | None, step: int) -> SaveFailed | None:
        """Compare what is shared before it is sealed: if it differs between members, it must not be committed.

        Collective over the group: usually one allreduce.

        Args:
            checks: a number for each leaf that is shared; None: this rank could not save.

        Returns:
            Why this step cannot be committed.
        """
        own = {}
        names = {}
        if plan is not None and checks is not None:
            names = {key_of(entry): entry.name for entry in plan.layout.entries}
            own = {key_of(plan.layout.entries[leaf]): check for leaf, check in checks.items()}
        number = xxhash.xxh3_64_intdigest(repr(sorted(own.items())).encode()) & _POSITIVE
        agreed = self._world.agree(min_of={"low": number}, max_of={"high": number}, all_of={"able": checks is not None},
                                   comm=self._comm)  # fmt: skip
        if agreed.low == agreed.high and agreed.able:
            return None
        if not agreed.able:
            failed = SaveFailed("a rank that shares state with this one could not save it", step=step)
            failed.follows = True
            return failed
        _, others = self._sort_out(own)
        self.version += bool(others.keys() & self.agreed)
        self.agreed -= others.keys()
        differ = _differing(names, others)
        self._warn({name: by for name, by in differ.items() if name not in self._apart}, step)
        self._apart |= differ.keys()
        what = ", ".join(sorted(differ)[:_NAMED]) or "what the ranks hold alike"
        return SaveFailed(f"ranks that share state hold different values of {what}: the step before is kept, and the "
                          "next save stores each rank's own", step=step)  # fmt: skip

    def _sort_out(self, own: Mapping[int, int]) -> tuple[set[int], dict[int, dict[int, list[int]]]]:
        """Find the keys for which all members have the same number; and for the others, which ranks have which.

        Collective over the group. If all have the same keys, which is usual, two allreduces are enough, however many
        members there are; only what differs is gathered.
        """
        keys = sorted(own)
        number = xxhash.xxh3_64_intdigest(np.array(keys, dtype="<u8").tobytes()) & _POSITIVE
        alike: set[int] = set()
        if self._world.is_same(number, self._comm):
            checks = [own[key] & _POSITIVE for key in keys]
            minima = self._world.least_of([*checks, *(-check for check in checks)], self._comm) if keys else []
            alike = {key for key, least, most in zip(keys, minima, minima[len(keys) :], strict=False) if least == -most}
            if len(alike) == len(keys):
                return alike, {}
        rest = [(key, check) for key, check in own.items() if key not in alike]
        table = np.array(rest, dtype="<u8").reshape(-1, 2)
        holders: dict[int, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        for rank, of_rank in zip(self.members, self._world.gather(table, self._comm), strict=True):
            for key, check in of_rank.tolist():
                holders[key][check].append(rank)
        alike |= {key for key, by in holders.items() if len(by) == 1 and self._on_all(by)}
        return alike, {key: by for key, by in holders.items() if key not in alike}

    def _on_all(self, by: Mapping[int, list[int]]) -> bool:
        return sum(map(len, by.values())) == len(self.members)

    def compare(self, slot: Slot, plan: Plan, step: int) -> None:
        """Compare a committed slot with those of the other ranks, and warn about what differs for the first time.

        Does nothing if ranks share, because they have compared before, or if nobody said what is alike. Collective over
        the group: usually one allreduce of two numbers.
        """
        if len(self.members) == 1 or self.sharing is not None or self._placed:
            return
        self._world.waiting_for = [rank for rank in self.members if rank != self._world.rank]
        layout = plan.layout
        if not plan.private <= self._apart:
            self._apart |= plan.private
            self._blocks = None
        number = self._one_number(slot, layout)
        if not self._world.is_same(number, self._comm):
            self._compare_each(slot, layout, step)
        self._world.waiting_for = ()

    def _one_number(self, slot: Slot, layout: Layout) -> int:
        if self._blocks is None or self._blocks[0] is not layout:
            self._blocks = (layout, *whole_blocks(layout, self._apart))
        _, blocks, pieces = self._blocks
        body = slot.body(layout.extents)
        sums = [xxhash.xxh3_64_intdigest(body[start:end].data) for start, end in pieces]
        known = np.concatenate([slot.table(layout.extents)[blocks], np.array(sums, dtype="<u8")])
        return xxhash.xxh3_64_intdigest(known.tobytes()) & _POSITIVE

    def _compare_each(self, slot: Slot, layout: Layout, step: int) -> None:
        payload = slot.payload(layout.extents)
        checks = {}
        names = {}
        for entry in layout.entries:
            if entry.nbytes and entry.name not in self._apart:
                key = key_of(entry)
                names[key] = entry.name
                checks[key] = xxhash.xxh3_64_intdigest(payload[entry.start : entry.start + entry.nbytes].data)
        _, others = self._sort_out(checks)
        differ = _differing(names, others)
        alone = {names[key] for key, by in others.items() if key in checks and not self._on_all(by)}
        self._apart |= alone | differ.keys()
        self._blocks = None
        self._warn(differ, step)

    def _warn(self, differ: dict[str, list[list[int]]], step: int) -> None:
        self.diverged += len(differ)
        self.differed_at = step if differ else self.differed_at
        # The first rank that holds a tensor reports it.
        reported = {name: parties for name, parties in differ.items() if min(map(min, parties)) == self._world.rank}
        if reported:
            where = self._world.topology.name_of
            texts = [f"{name} ({parties_in_words(parties, where)})" for name, parties in reported.items()]
            log.warning(
                "step %d is not the same on %s, though it should be: %s. A device may compute wrong "
                "results, or the ranks may not exchange what they should. If it differs on purpose, ignore this; "
                "it is named once",
                step, named(self.members), listed(texts, _NAMED),
            )  # fmt: skip


def whole_blocks(layout: Layout, apart: set[str]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The blocks whose checksums can be compared as they are, and the other pieces of the body.

    Args:
        apart: names of tensors that are not compared; the manifest is not compared either.

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
    for start, end in sorted(set(compared)):  # a set, because tied tensors share their bytes
        for block in range(start // size, -(-end // size)):
            if not usable[block]:
                pieces.append((max(start, block * size), min(end, (block + 1) * size)))
    return np.flatnonzero(usable), pieces


def _differing(names: Mapping[int, str], holders: Mapping[int, dict[int, list[int]]]) -> dict[str, list[list[int]]]:
    """By name, the ranks that have one number for a tensor, and those that have another."""
    return {names[key]: list(by.values()) for key, by in holders.items() if key in names and len(by) > 1}


def parties_in_words(parties: list[list[int]], node_of: Callable[[int], str]) -> str:
    """Say which ranks differ from which: the minority from the majority, and where if more than half agree."""
    usual = max(parties, key=lambda ranks: (len(ranks), -min(ranks)))
    odd = sorted(rank for ranks in parties if ranks is not usual for rank in ranks)
    is_clear = 2 * len(usual) > sum(map(len, parties))
    where = ", ".join(sorted({node_of(rank) for rank in odd})[:_NAMED]) if is_clear else ""
    minority = f"{named(odd)} on {where}" if where else named(odd)
    return f"{minority} differ{'s' * (len(odd) == 1)} from {ranges(usual)}"
