"""A checkpoint in memory, in the slots of its old ranks, open: any rank reads any part of any tensor.

What lies on a rank's own node is read from its files; the rest is asked of ranks of other nodes (see `fragments`).
"""

from __future__ import annotations

import dataclasses
import pickle
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import xxhash

from ..memory.inventory import file_name, file_number
from ..memory.shared_memory_segment import attach
from ..memory.slot import Slot
from ..memory.slot_header import Attempt
from ..redundancy.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..startup.context import Context
from ..state import shards
from ..state.leaves import Entry, Tree
from ..state.rebuild import Read
from ..state.shards import Held, box
from .exchange_fragments import WantedPart, exchange, items


@dataclasses.dataclass
class FoundElsewhere:
    """A restorable checkpoint in the slots of its old ranks.

    Attributes:
        attempt, step: of it.
        restores: how many runs have restored it, this one included.
        homes: what this rank has or reads, by old rank; verified.
        files: where shares are.
        same_ranks: whether its ranks are those of today, each with its own slot.
    """

    attempt: Attempt
    step: int
    restores: int
    homes: dict[int, RankCheckpoint]
    files: ShareFiles
    same_ranks: bool = False


@dataclasses.dataclass(frozen=True)
class OldRank:
    """What an old rank's slot holds, and who has it.

    Attributes:
        server: the rank that reads it.
        file: number of its file on the node of that rank.
        entries, tree: of its manifest.
        plain: its plain leaves by path, encoded.
        checks: of each entry that is whole, a checksum of its bytes, where these were asked for.
        told: the bytes of some entries, by name.
    """

    server: int
    file: int
    entries: tuple[Entry, ...]
    tree: Tree
    plain: dict[str, Any]
    checks: dict[int, int]
    told: dict[str, bytes]


class OpenCheckpoint(Protocol):
    """A checkpoint of whatever ranks, open, in memory (`OpenInMemory`) or in a directory (`drained.Drained`)."""

    step: int
    restores: int
    olds: Mapping[int, OldRank]
    home: RankCheckpoint | None

    def is_near(self, rank: int) -> bool:
        """See `OpenInMemory`."""

    def distance(self, rank: int) -> int:
        """See `OpenInMemory`."""

    def read(self, wanted: Iterable[WantedPart]) -> bool:
        """See `OpenInMemory`."""

    def close(self) -> None:
        """See `OpenInMemory`."""


class OpenInMemory:
    """Reads parts of tensors of all old ranks.

    Collective over the world.

    Args:
        context: of this rank.
        found: where the checkpoint is.
        checks: make checksums of all tensors that are whole.
        told: names of small entries whose bytes all ranks shall know.

    Attributes:
        olds: what there is, by old rank; the same on all ranks.
        step: of it.
        restores: how many runs have restored it, this one included.
        home: this rank's own slot, where the ranks are those of today; else None.
    """

    def __init__(self, context: Context, found: FoundElsewhere, checks: bool = False, told: Collection[str] = ()):
        self.found, self._context = found, context
        self.step, self.restores = found.step, found.restores
        self.home = found.homes.get(context.world.rank) if found.same_ranks else None
        mine = context.world.on_all(
            lambda: {rank: _describe(context, home, checks, told) for rank, home in found.homes.items()}
        )
        packed = context.world.gather(zlib.compress(pickle.dumps(mine), 1))
        self.olds: Mapping[int, OldRank] = {
            rank: old for theirs in packed for rank, old in pickle.loads(zlib.decompress(theirs)).items()
        }

    def is_near(self, rank: int) -> bool:
        """Whether the slot of an old rank is on this node. Not collective."""
        topology = self._context.world.topology
        return topology.node_of[self.olds[rank].server] == self._context.world.node_index

    def distance(self, rank: int) -> int:
        """How far the slot of an old rank is: 0 that of this rank's own number, 1 on this node, 2 elsewhere."""
        return 2 if not self.is_near(rank) else int(rank != self._context.world.rank)

    def read(self, wanted: Iterable[WantedPart]) -> bool:
        """Bring parts of tensors to where they are wanted; whether all of them arrived whole.

        Collective over the world.

        Raises:
            MlflashError: on all ranks, where one could not read its part or ``wanted`` failed there.
        """
        asked: dict[int, list[WantedPart]] = {}
        self._context.world.on_all(lambda: self._read_near(wanted, asked))
        has = {rank: (home.reader(), home.manifest.entries) for rank, home in self.found.homes.items()}
        good = exchange(self._context, has, asked)
        self._context.recorder.counts["bytes asked of other nodes"] += sum(
            p.target.nbytes for ps in asked.values() for p in ps
        )
        return good

    def _read_near(self, wanted: Iterable[WantedPart], asked: dict[int, list[WantedPart]]) -> None:
        """Read what lies on this node; adds the rest to what other ranks are asked for. Not collective."""
        homes = dict(self.found.homes)
        reads: dict[int, Read] = {}
        try:
            for wanted_part in wanted:
                old = self.olds[wanted_part.rank]
                if not self.is_near(wanted_part.rank):
                    asked.setdefault(old.server, []).append(wanted_part)
                    continue
                if wanted_part.rank not in homes:
                    homes[wanted_part.rank] = self._open(old)
                if wanted_part.rank not in reads:
                    reads[wanted_part.rank] = homes[wanted_part.rank].reader()
                source = homes[wanted_part.rank].manifest.entries[wanted_part.number]
                whole = items(reads[wanted_part.rank](source), source)
                wanted_part.target[...] = whole[box(wanted_part.source, wanted_part.shape)]
        finally:
            for rank in homes.keys() - self.found.homes.keys():
                self._unmap(homes[rank])

    def close(self) -> None:
        """Unmap what is none of this rank's own. Not collective."""
        for home in self.found.homes.values():
            self._unmap(home)

    def _open(self, old: OldRank) -> RankCheckpoint:
        segment = attach(self._context.memory, file_name(old.file), self._context.pool.mapped())
        context = self._context
        return open_rank_checkpoint(
            context.memory, context.pool.mapped(), context.world.node_index, Slot(segment), self.found.files
        )

    def _unmap(self, home: RankCheckpoint) -> None:
        self._context.pool.unmap_others([home.slot, *home.shares])


def held_by_name(opened: OpenCheckpoint) -> dict[str, list[Held]]:
    """What the old ranks hold of each tensor. Not collective."""
    held: dict[str, list[Held]] = {}
    for rank, old in sorted(opened.olds.items()):
        for number, entry in enumerate(old.entries):
            held.setdefault(entry.name, []).append(Held(rank, number, entry, old.checks.get(number)))
    return held


def _describe(context: Context, home: RankCheckpoint, checks: bool, told: Collection[str]) -> OldRank:
    read, entries = home.reader(), home.manifest.entries
    made = {
        number: xxhash.xxh3_64_intdigest(np.ascontiguousarray(read(entry)).data)
        for number, entry in enumerate(entries)
        if checks and entry.shape == entry.global_shape
    }
    paths = shards.plain_leaves(home.manifest.tree)
    plain = {path: home.manifest.plain[number] for path, number in paths.items()}
    text = {entry.name: read(entry).tobytes() for entry in entries if entry.name in told}
    number = file_number(home.slot.name)
    return OldRank(context.world.rank, number, entries, home.manifest.tree, plain, made, text)
