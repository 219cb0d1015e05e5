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

from ..channel.client import TrainerState
from ..channel.describe_ranks import Described, gather_ranks
from ..channel.wanted_parts import WantedPart, exchange, items
from ..errors import MlflashError
from ..memory.node_directory import file_number
from ..memory.slot import Attempt, Slot
from ..protect.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..state.boxes import box
from ..state.copy_kernel import copy_into
from ..state.old_ranks import OldRanks
from ..state.rebuild import Read

_PARTS = 8192  # requested from other ranks at a time


@dataclasses.dataclass
class MemoryCheckpoint:
    """What a rank has or reads of a checkpoint in memory, verified."""

    attempt: Attempt
    step: int
    restores: int  # how many runs have restored it, including this one
    homes: dict[int, RankCheckpoint]  # by rank of the checkpoint
    files: ShareFiles
    own: RankCheckpoint | None = None  # the only one of them, in an own slot of this rank, if as many ranks saved it

    @property
    def slots(self) -> list[Slot]:
        return [slot for home in self.homes.values() for slot in (home.slot, *home.shares)]


class OpenCheckpoint(Protocol):
    """An open checkpoint of any number of ranks, in memory (`OpenInMemory`) or in a directory (`OpenInDirectory`)."""

    step: int
    path: str  # the folder in a directory, or "memory"
    restores: int
    olds: OldRanks
    home: RankCheckpoint | None

    def is_near(self, rank: int) -> bool: ...

    def distance(self, rank: int) -> int: ...

    def read(self, wanted: Iterable[WantedPart]) -> bool: ...

    def close(self) -> None: ...


class OpenInMemory:
    """Reads parts of tensors of all old ranks. Collective.

    ``checks``: make checksums of all tensors that are whole. ``broadcast``: names of entries whose bytes every rank
    needs. ``home``: this rank's own slot, if its ranks saved it.
    """

    path = "memory"

    def __init__(self, trainer: TrainerState, checkpoint: MemoryCheckpoint, checks: bool = False,
                 broadcast: Collection[str] = ()):  # fmt: skip
        self._checkpoint, self._trainer, self._ranks = checkpoint, trainer, trainer.ranks
        self.step, self.restores, self.home = checkpoint.step, checkpoint.restores, checkpoint.own
        described = self._ranks.on_all(lambda: {
            rank: _describe(self._ranks.rank, home, checks, broadcast) for rank, home in checkpoint.homes.items()
        })  # fmt: skip
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
        checkpoint, parts = self._checkpoint, iter(wanted)
        homes = {rank: file_number(home.slot.name) for rank, home in checkpoint.homes.items()}
        while True:
            asked: dict[int, list[WantedPart]] = {}
            _, (most, is_through) = self._ranks.together_least(
                functools.partial(self._read_near, parts, asked),
                lambda count: [-count, count < _PARTS],
                2,
                lambda why: MlflashError(f"this rank could not read its parts: {why}"),
            )
            if most:  # of any rank
                courier = self._trainer.courier
                is_intact = exchange(courier, self._ranks, checkpoint.attempt, homes, checkpoint.files, asked)
                if not self._ranks.all_of(is_intact):
                    return False
            if is_through:
                return True

    def _read_near(self, wanted: Iterator[WantedPart], asked: dict[int, list[WantedPart]]) -> int:
        """Read what is on this node, and ask other ranks for the rest; return the number of parts asked for."""
        count = 0
        homes = dict(self._checkpoint.homes)
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
                    homes[wanted_part.rank] = open_home(self._trainer, file, self._checkpoint.files)
                if wanted_part.rank not in reads:
                    reads[wanted_part.rank] = homes[wanted_part.rank].reader()
                source = homes[wanted_part.rank].manifest.entries[wanted_part.number]
                shard = items(reads[wanted_part.rank](source), source)
                copy_into(wanted_part.target, shard[box(wanted_part.source, wanted_part.shape)])
        finally:
            opened = [homes[rank] for rank in homes.keys() - self._checkpoint.homes.keys()]
            self._trainer.slots.unmap_others(slot for home in opened for slot in (home.slot, *home.shares))
        return count

    def close(self) -> None:
        self._trainer.slots.unmap_others(self._checkpoint.slots)


def open_home(trainer: TrainerState, file: int, files: ShareFiles) -> RankCheckpoint:
    """Map the slot of an old rank of this node, and its shares, for reading."""
    return open_rank_checkpoint(trainer.slots.open, trainer.ranks.node_index, trainer.slots.open(file), files)


def _describe(server: int, home: RankCheckpoint, checks: bool, broadcast: Collection[str]) -> Described:
    read, manifest = home.reader(), home.manifest
    sums = {
        number: xxhash.xxh3_64_intdigest(np.ascontiguousarray(read(entry)).data)
        for number, entry in enumerate(manifest.entries)
        if checks and entry.shape == entry.global_shape
    }
    text = {entry.name: read(entry).tobytes() for entry in manifest.entries if entry.name in broadcast}
    more = server, file_number(home.slot.name), text
    return Described.of(manifest.entries, manifest.tree, manifest.plain, sums, more)
