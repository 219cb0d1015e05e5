"""An open checkpoint in a directory: any rank reads any part of any tensor of any old rank.

One rank reads, from the file that commits the checkpoint, what all old ranks hold, and tells the others. Tensors are
read part by part, each directly from the file that has it. Each block that is touched is checked. Parts that are next
to each other are read at once, so that there are few reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import add, sub
from typing import Any, TypeVar

import numpy as np
import xxhash

from ..channel.ranks import Collectives
from ..channel.wanted_parts import WantedPart, items
from ..drain.checkpoint_directory import Listed, read_index
from ..drain.index import (
    CARD_NBYTES,
    Card,
    Index,
    Place,
    Places,
    RankFiles,
    blocks,
    decode_index,
    decode_places,
    decode_table,
    first_names,
    read_card,
)
from ..errors import ConfigError, CorruptSlot, DeadlineExceeded, MlflashError, pip_install, text_of
from ..events import Event
from ..memory.slot import Attempt
from ..protect.rank_checkpoint import RankCheckpoint
from ..state.boxes import Box, box, cut, overlap
from ..state.leaves import Entry
from ..state.manifest import Manifest
from ..state.old_ranks import OldRanks
from ..state.rebuild import Read
from ..storage.store import Store

log = logging.getLogger("mlflash")

T = TypeVar("T")

_TELL_S = 1.0  # a read that takes longer is told to the ranks that wait
_SHARE = 0.9  # of `timeout_s` for a read: then this rank says what it could not read before others wait no more
_RUN_NBYTES = 64 << 20  # per read
_GAP_NBYTES = 64 << 10  # gaps up to this size are read along
_KEPT = 4  # indexes of files to keep
_ROUND_NBYTES = 1 << 30  # bytes that a rank reads before the ranks agree again
_PARTS = 8192  # parts per batch; more of them if they are of the last one's rank


class TimelyReads:
    """Reads that end within ``timeout_s`` of the ranks; other ranks hear what this one reads if it takes long.

    A read that hangs cannot be interrupted. So each read runs on a thread of its own, and its caller stops waiting for
    it. The thread only has the bytes that it reads: what they are copied to may be used again at once.
    """

    def __init__(self, world: Collectives, path: str):
        self._world, self._path, self._limit_s = world, path, _SHARE * world.timeout_s
        self.hang = False  # whether a read has not ended in time, and may still use what it reads from

    def run(self, name: str, read: Callable[[], T], done: int = 0, nbytes: int = 0) -> T:
        """Read from a file of which ``done`` of ``nbytes`` were read (0: unknown). May raise DeadlineExceeded."""
        if self.hang:
            raise self._late(name, "")
        result: list[T] = []
        error: list[BaseException] = []
        has_ended = Event()

        def work() -> None:
            try:
                result.append(read())
            except BaseException as problem:  # raised below
                error.append(problem)
            has_ended.set()

        threading.Thread(target=work, name="mlflash-read", daemon=True).start()
        end = time.monotonic() + self._limit_s
        how_far = f", {done / 1e6:.1f} of {nbytes / 1e6:.1f} MB" if nbytes else ""
        is_slow = False
        while not has_ended.wait(min(_TELL_S, end - time.monotonic())):
            if time.monotonic() >= end:
                self.hang = True
                raise self._late(name, how_far)
            if not is_slow:
                self._world.tell_doing(f"reading {self._path}/{name}{how_far}")
                is_slow = True
        if is_slow:
            self._world.tell_doing("restoring")
        if error:
            raise error[0]
        return result[0]

    def _late(self, name: str, how_far: str) -> DeadlineExceeded:
        rank, node = self._world.rank, self._world.node_name
        return DeadlineExceeded(
            f"a read of {self._path}/{name}{how_far} did not end within {self._limit_s:g} s. Nothing was restored: "
            "look at the file system on that node, and start the job again",
            rank=rank, node=node, ranks=[rank], nodes=[node],
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A box of the rows of a leaf that a file has, and where it goes."""

    place: Place
    name: str
    shape: tuple[int, ...]  # shape of all the rows in the file
    part: Box  # the box of them
    target: np.ndarray  # ``(*box, item bytes)`` uint8

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last byte that are needed, counted from the start of the rows."""
        offset, shape = self.part
        row = self.target.shape[-1] * math.prod(self.shape[1:])
        return (offset[0] * row, (offset[0] + shape[0]) * row) if shape else (0, row)

    def fill(self, raw: np.ndarray) -> None:
        offset, shape = self.part
        rows = raw.reshape(*shape[:1], *self.shape[1:], self.target.shape[-1])
        self.target[...] = rows[box((0, *offset[1:]), shape)] if shape else rows


class DrainedFiles:
    """Reads the files of a checkpoint, without a deadline where there are no ``reads``. Nothing is collective."""

    def __init__(self, inside: Store, attempt: Attempt, step: int, files: Sequence[RankFiles] | Mapping[int, RankFiles],
                 reads: TimelyReads | None = None):  # fmt: skip
        self._inside, self._attempt, self._step, self._files, self._reads = inside, attempt, step, files, reads
        self._open: dict[str, tuple[Any, Any]] = {}  # compressed files, which are read through HDF5
        self._indexes: dict[int, Index] = {}

    def close(self) -> None:
        hangs = self._reads is not None and self._reads.hang  # HDF5 holds its lock then
        for opened in () if hangs else self._open.values():
            for file in opened:
                file.close()
        self._open.clear()

    def _run(self, name: str, read: Callable[[], T], done: int = 0, nbytes: int = 0) -> T:
        return read() if self._reads is None else self._reads.run(name, read, done, nbytes)

    def index(self, rank: int) -> Index:
        if rank not in self._indexes:
            while len(self._indexes) >= _KEPT:
                self._indexes.pop(next(iter(self._indexes)))
            stored = self._files[rank]
            with self._as_corrupt():
                card = self._card(rank)
                raw = self._read(stored.card, card.index_start, card.index_nbytes, card.index_check)
            self._indexes[rank] = decode_index(raw, stored.data, stored.data_nbytes)
        return self._indexes[rank]

    @contextlib.contextmanager
    def _as_corrupt(self) -> Iterator[None]:
        """Turn an error of the file system into CorruptSlot: another checkpoint may be usable."""
        try:
            yield
        except OSError as problem:
            raise CorruptSlot(f"{self._inside.path} cannot be read: {problem}", step=self._step) from None

    def name_of(self, rank: int) -> str:
        return self._files[rank].card

    def _card(self, rank: int) -> Card:
        """Read the card of a rank's file, and compare it, and the sizes of the files, with what was committed."""
        stored, path = self._files[rank], self._inside.path
        nbytes, raw, data_nbytes = self._run(stored.card, lambda: self._read_card(stored))
        try:
            card = read_card(raw)
        except CorruptSlot as error:
            raise CorruptSlot(f"{path}/{stored.card}: {error.message}", step=self._step) from None
        stored_card = (nbytes, card.attempt, card.rank, card.index_check, data_nbytes)
        committed = (stored.nbytes, self._attempt, rank, stored.index_check, stored.data_nbytes)
        if stored_card != committed:
            raise CorruptSlot(f"{path}/{stored.card} is not the file that was committed", step=self._step)
        return card

    def _read_card(self, stored: RankFiles) -> tuple[int, bytes, int]:
        nbytes, raw = self._inside.nbytes(stored.card), self._inside.read(stored.card, 0, CARD_NBYTES)
        return nbytes, raw, nbytes if stored.data == stored.card else self._inside.nbytes(stored.data)

    def _read(self, name: str, start: int, nbytes: int, check: int) -> bytes:
        raw = self._run(name, lambda: self._inside.read(name, start, nbytes))
        if len(raw) != nbytes or xxhash.xxh3_64_intdigest(raw) != check:
            raise CorruptSlot(f"the index of {self._inside.path}/{name} is damaged", step=self._step)
        return raw

    def places(self, rank: int) -> Places:
        """Read where everything is in the file of a rank: only that part of its index."""
        if rank in self._indexes:
            return self.index(rank)
        files = self._files[rank]
        with self._as_corrupt():
            self._card(rank)
            raw = self._read(files.card, files.places_start, files.places_nbytes, files.places_check)
        return decode_places(raw, files.data, files.data_nbytes)[0]

    def content(self, rank: int, name: str, place: Place, at_once: int = _RUN_NBYTES) -> Iterator[np.ndarray]:
        places = self.index(rank)
        run = max(places.block_nbytes, at_once // places.block_nbytes * places.block_nbytes)
        for at in range(0, place.nbytes, run):
            end = min(place.nbytes, at + run)
            if place.packed:
                raw = self._unpacked(places, name, place.nbytes // place.rows, at, end)
            else:
                raw = self._read_part(places.data, place.start + at, end - at)
            self._check(places, place, name, at, raw, end - at)
            yield raw

    def fetch(self, runs: Sequence[Run], places: Places) -> Iterator[int]:
        """Read from a file what some runs need, in the order of the file; yield the number of bytes each time."""
        size = places.block_nbytes
        done, needed = 0, sum(run.target.nbytes for run in runs)
        batch: list[tuple[Run, int, int]] = []
        bounds = [run.bounds for run in runs]
        starts = [(run.place.packed, run.place.start + low) for run, (low, _) in zip(runs, bounds, strict=True)]
        for nth in sorted(range(len(runs)), key=starts.__getitem__):
            run, (low, high) = runs[nth], bounds[nth]
            low, high = low // size * size, min(run.place.nbytes, blocks(high, size) * size)
            if run.place.packed:
                row = run.target.shape[-1] * math.prod(run.shape[1:])
                raw = self._unpacked(places, run.name, row, low, high, (done, needed))
                self._check_and_fill(places, run, low, raw, high - low)
                done += run.target.nbytes
                yield high - low
                continue
            if batch and not self._joins(batch, run.place.start + low, run.place.start + high):
                yield self._fetch_at_once(places, batch, (done, needed))
                done += sum(run.target.nbytes for run, _, _ in batch)
                batch = []
            batch.append((run, low, high))
        if batch:
            yield self._fetch_at_once(places, batch, (done, needed))

    def _joins(self, batch: list[tuple[Run, int, int]], low: int, high: int) -> bool:
        """Whether bytes of the file are read together with those of a batch, which begin before them."""
        first = batch[0][0].place.start + batch[0][1]
        run, _, last = batch[-1]
        return low - run.place.start - last <= _GAP_NBYTES and high - first <= _RUN_NBYTES

    def _fetch_at_once(self, places: Places, batch: list[tuple[Run, int, int]], far: tuple[int, int]) -> int:
        first = batch[0][0].place.start + batch[0][1]
        last = max(run.place.start + high for run, _, high in batch)
        raw = self._read_part(places.data, first, last - first, far)
        for run, low, high in batch:
            at = run.place.start + low - first
            self._check_and_fill(places, run, low, raw[at : at + high - low], high - low)
        return last - first

    def _read_part(self, name: str, start: int, nbytes: int, far: tuple[int, int] = (0, 0)) -> np.ndarray:
        raw = self._run(name, lambda: self._inside.read(name, start, nbytes), *far)
        return np.frombuffer(raw, dtype=np.uint8)

    def _check_and_fill(self, places: Places, run: Run, low: int, raw: np.ndarray, nbytes: int) -> None:
        self._check(places, run.place, run.name, low, raw, nbytes)
        first, last = run.bounds
        run.fill(raw[first - low : last - low])

    def _check(self, places: Places, place: Place, name: str, low: int, raw: np.ndarray, nbytes: int) -> None:
        """Check whole blocks of a place; ``low`` is where they begin there."""
        size = places.block_nbytes
        wanted = places.checks[place.first_check + low // size :]
        for number, at in enumerate(range(0, nbytes, size)):
            if raw.nbytes != nbytes or xxhash.xxh3_64_intdigest(raw[at : at + size].data) != int(wanted[number]):
                raise CorruptSlot(f"block {low // size + number} is damaged in {self._inside.path}/{places.data}",
                                  tensor=name, step=self._step)  # fmt: skip

    def _unpacked(self, places: Places, name: str, row: int, low: int, high: int, far: tuple[int, int] = (0, 0)
                  ) -> np.ndarray:  # fmt: skip
        """Read bytes of rows that HDF5 has compressed; each row has so many bytes."""
        first, last = low // row, -(-high // row)
        raw = self._run(places.data, lambda: self._read_rows(places, name, row, first, last), *far)
        return raw[low - first * row : high - first * row]

    def _read_rows(self, places: Places, name: str, row: int, first: int, last: int) -> np.ndarray:
        from ..drain import hdf5_format

        try:
            if places.data not in self._open:
                file = self._inside.open(places.data)
                self._open[places.data] = (hdf5_format.open_file(file), file)
            dataset = self._open[places.data][0]["tensors"][hdf5_format.dataset_name(name)]
            return hdf5_format.read_rows(dataset, first, last, (last - first) * row)
        except Exception as error:  # HDF5 may raise anything if a file is damaged or a plugin is missing
            if places.data in self._open and (missing := hdf5_format.missing_filters(self._open[places.data][0])):
                raise ConfigError(f"{self._inside.path}/{places.data} cannot be read here: its compression "
                                  f"({', '.join(missing)}) is not installed: {pip_install('compression')}",
                                  tensor=name, step=self._step) from None  # fmt: skip
            raise CorruptSlot(f"HDF5 cannot read {self._inside.path}/{places.data}: {error}", tensor=name,
                              step=self._step) from None  # fmt: skip


# What all ranks do together


@dataclasses.dataclass(slots=True)
class _Asked:
    """A part that is asked for, how many of its elements are not found yet, and how many more files may have them."""

    part: WantedPart
    missing: int
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

    def __init__(self, world: Collectives, store: Store, listed: Listed, broadcast: Collection[str] = ()):
        self._world, inside, self.listed = world, store.at(listed.folder), listed
        self.step, self.path, self.world_size = listed.step, inside.path, listed.card.world_size
        self.restores, self.damage = 0, ""
        self.home: RankCheckpoint | None = None
        self._read_here = range(world.rank, self.world_size, world.size)  # the old ranks whose files this one reads
        own, reads = world.rank % self.world_size, TimelyReads(world, inside.path)
        read_table = functools.partial(read_index, inside, listed)
        # Rank 0 reads the file and broadcasts it by a tree.
        packed = self._together(lambda: b"" if world.rank else zlib.compress(reads.run(listed.master, read_table), 1))
        packed = world.broadcast(packed, 0)
        table = self._together(lambda: decode_table(zlib.decompress(packed), self.world_size))
        self._files = DrainedFiles(inside, listed.card.attempt, listed.step, table.files, reads)
        self._table = table
        self.olds = OldRanks(table.groups, table.differ, table.plain_differ, self._plain_of, {})
        # Read the index of the rank's own file now: later, only this rank would fail.
        self._own: tuple[int, Index] = own, self._together(lambda: self._files.index(own))
        if names := self.olds.spots.keys() & set(broadcast):
            contents = self._together(lambda: {rank: self._content(rank, names) for rank in self._read_here})
            for of_rank in world.gather(contents):
                self.olds.contents |= of_rank

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
            for rank in self._read_here
            for entry, place in self.index(rank).pieces
            for raw in self.content(rank, entry.name, place)
        ):
            raise CorruptSlot(f"{self.path} is damaged: {self.damage}", step=self.step)

    def _in_rounds(self, reading: Iterator[int]) -> bool:
        """Read as long as all goes well on all ranks; return whether it did. Collective over the world."""
        good, more, why = True, True, ""
        problem: MlflashError | None = None
        while True:
            budget_nbytes = _ROUND_NBYTES
            while good and more and budget_nbytes > 0:
                try:
                    nbytes = next(reading, None)
                    more = nbytes is not None
                    budget_nbytes -= nbytes or 0
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
        group = self.olds.groups[self.olds.group_of(rank)]
        if rank == group.ranks[0] or self.olds.plain_differ.isdisjoint(group.structure.paths):
            return group.plain
        plain = self.index(rank).manifest.plain
        if len(plain) != len(group.plain):
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

    def _content(self, rank: int, names: Collection[str]) -> dict[str, bytes]:
        raw: dict[str, np.ndarray] = {}
        wanted = []
        for number, entry in enumerate(self.olds[rank].entries):
            if entry.name in names:
                raw[entry.name] = np.empty(entry.nbytes, dtype=np.uint8)
                wanted.append(_all_of(rank, number, entry, raw[entry.name]))
        for _ in self._read(wanted):
            pass
        return {name: content.tobytes() for name, content in raw.items()}

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
            asked_part = _Asked(part, elements, len(holders))
            self._refuse_missing([asked_part])
            for rank, number in holders:
                asked.setdefault(rank, []).append((number, asked_part))
        yield from self._read_files(asked, set(asked))

    def _read_files(self, asked: dict[int, list[tuple[int, _Asked]]], ranks: set[int]) -> Iterator[int]:
        """Read what is asked for from the files of some ranks; each rank begins with another one."""
        first = self._world.rank * self.world_size // self._world.size
        for rank in sorted(ranks & asked.keys(), key=lambda rank: (rank - first) % self.world_size):
            places, of_rank = self._files.places(rank), asked.pop(rank)
            runs: list[Run] = []
            for number, asked_part in of_rank:
                asked_part.files -= 1
                for run in self._runs(rank, number, asked_part.part, places):
                    asked_part.missing -= math.prod(run.part[1])
                    runs.append(run)
            self._refuse_missing(asked_part for _, asked_part in of_rank)
            yield from self._files.fetch(runs, places)

    def _refuse_missing(self, asked: Iterable[_Asked]) -> None:
        for asked_part in asked:
            if asked_part.missing and not asked_part.files:
                name, _ = self._leaf(asked_part.part.rank, asked_part.part.number)
                raise CorruptSlot("parts of this tensor are not in the files of the checkpoint", tensor=name,
                                  step=self.step)  # fmt: skip

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
        for offset, part in cut(both[1], item, _RUN_NBYTES):
            yield Run(place, name, rows, (tuple(map(add, inside, offset)), part), target[box(offset, part)])
