"""An open checkpoint in memory, in the slots of its old ranks: any rank reads any part of any tensor.

A rank reads what is on its own node from the files there, and asks ranks of other nodes for the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

import numpy as np
import xxhash

from ..channel.client import TrainerContext
from ..channel.describe_ranks import Described, gather_ranks
from ..channel.wanted_parts import WantedPart, exchange, items
from ..memory.node_directory import file_number
from ..memory.slot import Attempt
from ..protect.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..state.boxes import box
from ..state.old_ranks import OldRanks
from ..state.rebuild import Read

_PARTS = 8192  # requested from other ranks at a time


@dataclasses.dataclass
class FoundElsewhere:
    """A restorable checkpoint in the slots of its old ranks."""

    attempt: Attempt
    step: int
    restores: int
    homes: dict[int, RankCheckpoint]  # what this rank has or reads, by old rank; verified
    files: ShareFiles
    same_ranks: bool = False  # whether its ranks are the ranks of this run, each with its own slot


class OpenCheckpoint(Protocol):
    """An open checkpoint of any number of ranks, in memory (`OpenInMemory`) or in a directory (`OpenInDirectory`)."""

    step: int
    restores: int
    olds: OldRanks
    home: RankCheckpoint | None

    def is_near(self, rank: int) -> bool: ...

    def distance(self, rank: int) -> int: ...

    def read(self, wanted: Iterable[WantedPart]) -> bool: ...

    def close(self) -> None: ...


class OpenInMemory:
    """Reads parts of tensors of all old ranks. Collective.

    ``checks``: make checksums of all tensors that are whole. ``home``: this rank's own slot, if its ranks saved it.
    """

    def __init__(self, trainer: TrainerContext, found: FoundElsewhere, checks: bool = False,
                 told: Collection[str] = ()):  # fmt: skip
        self.found, self._trainer, self._ranks = found, trainer, trainer.ranks
        self.step, self.restores = found.step, found.restores
        me = self._ranks.rank
        self.home = found.homes.get(me) if found.same_ranks else None
        described = self._ranks.on_all(
            lambda: {rank: _describe(me, home, checks, told) for rank, home in found.homes.items()}
        )
        gathered = gather_ranks(self._ranks, described)
        self._places: dict[int, tuple[int, int]] = {
            rank: (server, file) for rank, (server, file, _) in gathered.more.items()
        }
        texts = {rank: text for rank, (*_, text) in gathered.more.items() if text}
        self.olds = gathered.old_ranks(checks, texts, [rank for rank in self._places if self.is_near(rank)])

    def is_near(self, rank: int) -> bool:
        server, _ = self._places[rank]
        return self._ranks.topology.node_of[server] == self._ranks.node_index

    def distance(self, rank: int) -> int:
        """How far the slot of an old rank is: 0 for this rank's own number, 1 on this node, 2 elsewhere."""
        return 2 if not self.is_near(rank) else int(rank != self._ranks.rank)

    def read(self, wanted: Iterable[WantedPart]) -> bool:
        """Read parts of tensors to where they are needed; return whether all of them arrived whole. Collective.

        Raises MlflashError on all ranks, if one could not read its part or ``wanted`` failed there.
        """
        found, left = self.found, iter(wanted)
        homes = {rank: file_number(home.slot.name) for rank, home in found.homes.items()}
        while True:
            asked: dict[int, list[WantedPart]] = {}
            count = self._ranks.on_all(functools.partial(self._read_near, left, asked))
            courier = self._trainer.courier
            whole = exchange(courier, self._ranks, found.attempt, homes, found.files, asked)
            agreed = self._ranks.agree(all_of={"whole": whole, "through": count < _PARTS})
            if agreed.through or not agreed.whole:
                return bool(agreed.whole)

    def _read_near(self, wanted: Iterator[WantedPart], asked: dict[int, list[WantedPart]]) -> int:
        """Read what is on this node, and ask other ranks for the rest; return the number of parts asked for."""
        count = 0
        homes = dict(self.found.homes)
        reads: dict[int, Read] = {}
        try:
            for wanted_part in wanted:
                server, file = self._places[wanted_part.rank]
                if not self.is_near(wanted_part.rank):
                    asked.setdefault(server, []).append(wanted_part)
                    count += 1
                    if count == _PARTS:
                        break
                    continue
                if wanted_part.rank not in homes:
                    homes[wanted_part.rank] = open_home(self._trainer, file, self.found.files)
                if wanted_part.rank not in reads:
                    reads[wanted_part.rank] = homes[wanted_part.rank].reader()
                source = homes[wanted_part.rank].manifest.entries[wanted_part.number]
                whole = items(reads[wanted_part.rank](source), source)
                wanted_part.target[...] = whole[box(wanted_part.source, wanted_part.shape)]
        finally:
            for rank in homes.keys() - self.found.homes.keys():
                self._unmap(homes[rank])
        return count

    def close(self) -> None:
        for home in self.found.homes.values():
            self._unmap(home)

    def _unmap(self, home: RankCheckpoint) -> None:
        self._trainer.slots.unmap_others([home.slot, *home.shares])


def open_home(trainer: TrainerContext, file: int, files: ShareFiles) -> RankCheckpoint:
    """Map the slot of an old rank of this node, and its shares, for reading."""
    return open_rank_checkpoint(trainer.slots.open, trainer.ranks.node_index, trainer.slots.open(file), files)


def _describe(server: int, home: RankCheckpoint, checks: bool, told: Collection[str]) -> Described:
    read, manifest = home.reader(), home.manifest
    made = {
        number: xxhash.xxh3_64_intdigest(np.ascontiguousarray(read(entry)).data)
        for number, entry in enumerate(manifest.entries)
        if checks and entry.shape == entry.global_shape
    }
    text = {entry.name: read(entry).tobytes() for entry in manifest.entries if entry.name in told}
    more = server, file_number(home.slot.name), text
    return Described.of(manifest.entries, manifest.tree, manifest.plain, made, more)
