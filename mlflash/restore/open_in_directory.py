"""An open checkpoint in a directory: any rank reads any part of any tensor of any old rank.

One rank reads, from the file that commits the checkpoint, what all old ranks hold, and tells the others. Tensors are
read part by part, each directly from the file that has it (`drained_files`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import add, sub
from typing import Any, TypeVar

import numpy as np

from ..courier.ranks import Collectives
from ..courier.wanted_parts import WantedPart, items
from ..drain.checkpoint_directory import Listed, read_index
from ..drain.index import Index, Place, Places, decode_table, first_names
from ..errors import ConfigError, CorruptSlot, DeadlineExceeded, MlflashError, text_of
from ..protect.rank_checkpoint import RankCheckpoint
from ..state.leaves import Entry
from ..state.manifest import Manifest
from ..state.old_ranks import OldRanks
from ..state.rebuild import Read
from ..state.shards import box, cut, overlap
from ..storage.store import Store
from .drained_files import RUN_NBYTES, DrainedFiles, Run, TimelyReads

log = logging.getLogger("mlflash")

T = TypeVar("T")

_ROUND_NBYTES = 1 << 30  # bytes that a rank reads before the ranks agree again
_PARTS = 8192  # parts per batch; more of them if they are of the last one's rank


@dataclasses.dataclass(slots=True)
class _Asked:
    """A part that is asked for, how many of its elements are not found yet, and how many more files may have them."""

    part: WantedPart
    left: int
    files: int


def _all_of(rank: int, number: int, entry: Entry, raw: np.ndarray) -> WantedPart:
    return WantedPart(rank, number, (0,) * len(entry.shape), entry.shape, items(raw, entry))


class OpenInDirectory:
    """A committed checkpoint of a directory. Collective.

    Attributes:
        damage: why the last `read` failed, from the lowest rank on which it failed; the same on all.

    Raises:
        CorruptSlot: on all ranks, if a file is missing, damaged, or was changed since.
        DeadlineExceeded: on all ranks, if a read does not end on some rank.
    """

    def __init__(self, world: Collectives, store: Store, listed: Listed, told: Collection[str] = ()):
        self._world, inside, self.listed = world, store.at(listed.folder), listed
        self.step, self.path, self.world_size = listed.step, inside.path, listed.card.world_size
        self.restores, self.damage = 0, ""
        self.home: RankCheckpoint | None = None
        self._mine = range(world.rank, self.world_size, world.size)  # the old ranks whose files this one reads
        own, reads = world.rank % self.world_size, TimelyReads(world, inside.path)
        read_table = functools.partial(read_index, inside, listed)
        # Rank 0 reads the file and broadcasts it by a tree.
        packed = self._together(lambda: b"" if world.rank else zlib.compress(reads.run(listed.master, read_table), 1))
        packed = world.broadcast(packed, 0)
        table = self._together(lambda: decode_table(zlib.decompress(packed), self.world_size))
        self._files, self._table = DrainedFiles(inside, listed, table.files, reads), table
        self.olds = OldRanks(table.groups, table.differ, table.plain_differ, self._plain_of, {})
        # Read the index of the rank's own file now: later, only this rank would fail.
        self._own: tuple[int, Index] = own, self._together(lambda: self._files.index(own))
        if names := self.olds.spots.keys() & set(told):
            texts = self._together(lambda: {rank: self._texts(rank, names) for rank in self._mine})
            self.olds.told |= {rank: text for theirs in world.gather(texts) for rank, text in theirs.items()}

    def is_near(self, rank: int) -> bool:
        return True

    def distance(self, rank: int) -> int:
        return 1

    def read(self, wanted: Iterable[WantedPart]) -> bool:
        """Read parts of tensors to where they are needed; return whether all of them arrived whole.

        Collective over the world. The ranks wait for each other after each GiB, so that a slow file system is not
        mistaken for a dead rank.
        """
        return self._in_rounds(self._read(wanted))

    def verify_together(self) -> None:
        """Read every byte of all files, divided among the ranks, as `read` does. Collective over the world.

        Raises CorruptSlot on all ranks, if something is damaged.
        """
        if not self._in_rounds(
            raw.nbytes
            for rank in self._mine
            for entry, place in self.index(rank).pieces
            for raw in self.content(rank, entry.name, place)
        ):
            raise CorruptSlot(f"{self.path} is damaged: {self.damage}", step=self.step)

    def _in_rounds(self, reading: Iterator[int]) -> bool:
        """Read as long as all goes well on all ranks; return whether it did. Collective over the world."""
        good, more, why = True, True, ""
        problem: MlflashError | None = None
        while True:
            left = _ROUND_NBYTES
            while good and more and left > 0:
                try:
                    nbytes = next(reading, None)
                    more = nbytes is not None
                    left -= nbytes or 0
                except (ConfigError, DeadlineExceeded) as error:  # nothing is damaged, and nothing older may be taken
                    good, problem = False, error
                except Exception as error:  # from reading files, or from what yields the wanted parts
                    log.warning("rank %d: %s cannot be restored from: %s", self._world.rank, self.path, error)
                    good, why = False, str(error)
            self._world.renew_deadline()
            agreed = self._world.agree(all_of={"good": good}, any_of={"more": more})
            if not agreed.good:
                self._world.raise_together(problem)
                self.damage = next(filter(None, self._world.gather(why)), "")
            if not agreed.more or not agreed.good:
                return bool(agreed.good)

    def state(self, rank: int) -> tuple[Manifest, Read, list[WantedPart]]:
        """Return what an old rank's state is built from: its manifest, its bytes, and what must be read before."""
        manifest = self.index(rank).manifest
        names = first_names(manifest.entries)
        raw: dict[str, np.ndarray] = {}
        wanted_parts = []
        for number, (entry, name) in enumerate(zip(manifest.entries, names, strict=True)):
            if name not in raw:
                raw[name] = np.empty(entry.nbytes, dtype=np.uint8)
                wanted_parts.append(_all_of(rank, number, entry, raw[name]))
        first = dict(zip((entry.name for entry in manifest.entries), names, strict=True))
        return manifest, lambda entry: raw[first[entry.name]], wanted_parts

    def close(self) -> None:
        self._files.close()

    def verify(self, rank: int) -> tuple[str, int, list[str]]:
        """Read every byte of a rank's file; yield file, bytes, and the tensors in which a block is bad.

        Raises:
            CorruptSlot: it is missing, or its card or index is damaged.
            ConfigError: a library that reads its compression is not installed.
        """
        bad, nbytes = [], 0
        for entry, place in self.index(rank).pieces:
            try:
                nbytes += sum(raw.nbytes for raw in self.content(rank, entry.name, place))
            except ConfigError:
                raise
            except (MlflashError, OSError):
                bad.append(entry.name)
        return self.index(rank).data, nbytes, bad

    def index(self, rank: int) -> Index:
        return self._own[1] if rank == self._own[0] else self._files.index(rank)

    def name_of(self, rank: int) -> str:
        return self._files.name_of(rank)

    def content(self, rank: int, name: str, place: Place) -> Iterator[np.ndarray]:
        """Read the bytes of some rows in a rank's file, some at a time; each block is checked."""
        return self._files.content(rank, name, place)

    def _plain_of(self, rank: int) -> list[Any]:
        """The plain leaves of an old rank: its file is read only if the ranks have different ones."""
        its = self.olds.groups[self.olds.group_of(rank)]
        if rank == its.ranks[0] or self.olds.plain_differ.isdisjoint(its.structure.paths):
            return its.plain
        plain = self.index(rank).manifest.plain
        if len(plain) != len(its.plain):
            raise CorruptSlot(
                "this file has another structure than the one that was committed", step=self.step, rank=rank
            )
        return plain

    def _together(self, work: Callable[[], T]) -> T:
        results: list[T] = []
        error: MlflashError | None = None
        try:
            results.append(work())
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # from any library that reads files
            why = str(problem) if isinstance(problem, OSError) else text_of(problem)
            error = CorruptSlot(f"{self.path} cannot be read: {why}", step=self.step)
        self._world.raise_together(error)
        return results[0]

    def _texts(self, rank: int, told: Collection[str]) -> dict[str, bytes]:
        raw: dict[str, np.ndarray] = {}
        wanted = []
        for number, entry in enumerate(self.olds[rank].entries):
            if entry.name in told:
                raw[entry.name] = np.empty(entry.nbytes, dtype=np.uint8)
                wanted.append(_all_of(rank, number, entry, raw[entry.name]))
        for _ in self._read(wanted):
            pass
        return {name: its.tobytes() for name, its in raw.items()}

    def _read(self, wanted: Iterable[WantedPart]) -> Iterator[int]:
        """Read parts, so many at a time because each takes memory; yield the number of bytes each time."""
        asked: dict[int, list[tuple[int, _Asked]]] = {}
        come: set[int] = set()
        count = 0
        for part in wanted:
            if count >= _PARTS and part.rank not in come:
                yield from self._read_files(asked, come)
                come, count = set(), 0
            come.add(part.rank)
            count += 1
            begin, rows = (part.source[0], part.shape[0]) if part.shape else (0, 1)
            elements = math.prod(part.shape)
            holders = self._holders(part.rank, part.number, begin, begin + rows) if elements else []
            its = _Asked(part, elements, len(holders))
            self._refuse_missing([its])
            for rank, number in holders:
                asked.setdefault(rank, []).append((number, its))
        yield from self._read_files(asked, set(asked))

    def _read_files(self, asked: dict[int, list[tuple[int, _Asked]]], ranks: set[int]) -> Iterator[int]:
        """Read what is asked for from the files of some ranks; each rank begins with another one."""
        first = self._world.rank * self.world_size // self._world.size
        for rank in sorted(ranks & asked.keys(), key=lambda rank: (rank - first) % self.world_size):
            places, those = self._files.places(rank), asked.pop(rank)
            runs: list[Run] = []
            for number, its in those:
                its.files -= 1
                for run in self._runs(rank, number, its.part, places):
                    its.left -= math.prod(run.part[1])
                    runs.append(run)
            self._refuse_missing(its for _, its in those)
            yield from self._files.fetch(runs, places)

    def _refuse_missing(self, asked: Iterable[_Asked]) -> None:
        if missing := next((its.part for its in asked if its.left and not its.files), None):
            raise CorruptSlot("parts of this tensor are not in the files of the checkpoint",
                              tensor=self._leaf(missing.rank, missing.number)[0], step=self.step)  # fmt: skip

    def _leaf(self, rank: int, number: int) -> tuple[str, tuple[int, ...]]:
        structure, row = self.olds.row(rank)
        return structure.names[number], structure.shape(row, number)

    def _holders(self, rank: int, number: int, begin: int, end: int) -> list[tuple[int, int]]:
        """The files that may have rows of a leaf: old rank, and number of the leaf there."""
        structure, row = self.olds.row(rank)
        number = structure.ties[number]
        name = structure.names[number]
        ranks = self._table.holders(rank, structure, row, number, begin, end)
        numbers = ((held_by, number if held_by == rank else self.olds.row(held_by)[0].numbers.get(name))
                   for held_by in ranks)  # fmt: skip
        return [(held_by, held_as) for held_by, held_as in numbers if held_as is not None]

    def _runs(self, rank: int, number: int, wanted_part: WantedPart, places: Places) -> Iterator[Run]:
        if (place := places.of.get(number)) is None:
            return
        name, shape = self._leaf(rank, number)
        rows = (place.rows, *shape[1:]) if shape else ()
        item = wanted_part.target.shape[-1]
        if place.nbytes != math.prod(rows) * item:
            raise CorruptSlot(f"a file has {place.nbytes} bytes of {rows}", tensor=name, step=self.step, rank=rank)
        start = (place.begin, *(0,) * (len(shape) - 1)) if shape else ()
        both = overlap((wanted_part.source, wanted_part.shape), (start, rows))
        if both is None:
            return
        inside = tuple(map(sub, both[0], start))
        target = wanted_part.target[box(tuple(map(sub, both[0], wanted_part.source)), both[1])]
        for offset, part in cut(both[1], item, RUN_NBYTES):
            yield Run(place, name, rows, (tuple(map(add, inside, offset)), part), target[box(offset, part)])
