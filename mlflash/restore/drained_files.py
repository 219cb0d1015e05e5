"""The files of one checkpoint in a directory, read part by part, each directly from the file that has it.

Each block that is touched is checked. Parts that are next to each other are read at once, so that there are few reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import xxhash

from ..courier.ranks import Collectives
from ..drain.checkpoint_directory import Listed
from ..drain.index import (
    CARD_NBYTES,
    Card,
    Index,
    Place,
    Places,
    Stored,
    blocks,
    decode_index,
    decode_places,
    read_card,
)
from ..errors import ConfigError, CorruptSlot, DeadlineExceeded, pip_install
from ..events import Event
from ..state.shards import Box, box
from ..storage.store import Store

T = TypeVar("T")

_TELL_S = 1.0  # a read that takes longer is told to the ranks that wait
_SHARE = 0.9  # of `timeout_s` for a read: then this rank says what it could not read before others wait no more
RUN_NBYTES = 64 << 20  # per read
_GAP_NBYTES = 64 << 10  # gaps up to this size are read along
_KEPT = 4  # indexes of files to keep


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
        is_told = False
        while not has_ended.wait(min(_TELL_S, end - time.monotonic())):
            if time.monotonic() >= end:
                self.hang = True
                raise self._late(name, how_far)
            if not is_told:
                self._world.tell_doing(f"reading {self._path}/{name}{how_far}")
                is_told = True
        if is_told:
            self._world.tell_doing("restoring")
        if error:
            raise error[0]
        return result[0]

    def _late(self, name: str, how_far: str) -> DeadlineExceeded:
        world = self._world
        where: dict[str, Any] = {"rank": world.rank, "node": world.node_name, "ranks": [world.rank]}
        return DeadlineExceeded(
            f"a read of {self._path}/{name}{how_far} did not end within {self._limit_s:g} s. Nothing was restored: "
            "look at the file system on that node, and start the job again", **where, nodes=[world.node_name],
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

    def __init__(self, inside: Store, listed: Listed, files: Sequence[Stored] | Mapping[int, Stored],
                 reads: TimelyReads | None = None):  # fmt: skip
        self._inside, self._listed, self._files, self._reads = inside, listed, files, reads
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
            raise CorruptSlot(f"{self._inside.path} cannot be read: {problem}", step=self._listed.step) from None

    def name_of(self, rank: int) -> str:
        return self._files[rank].card

    def _card(self, rank: int) -> Card:
        """Read the card of a rank's file, and compare it, and the sizes of the files, with what was committed."""
        stored, path = self._files[rank], self._inside.path
        nbytes, raw, data_nbytes = self._run(stored.card, lambda: self._read_card(stored))
        try:
            card = read_card(raw)
        except CorruptSlot as error:
            raise CorruptSlot(f"{path}/{stored.card}: {error.message}", step=self._listed.step) from None
        found = (nbytes, card.attempt, card.rank, card.index_check, data_nbytes)
        wanted = (stored.nbytes, self._listed.card.attempt, rank, stored.index_check, stored.data_nbytes)
        if found != wanted:
            raise CorruptSlot(f"{path}/{stored.card} is not the file that was committed", step=self._listed.step)
        return card

    def _read_card(self, stored: Stored) -> tuple[int, bytes, int]:
        nbytes, raw = self._inside.nbytes(stored.card), self._inside.read(stored.card, 0, CARD_NBYTES)
        return nbytes, raw, nbytes if stored.data == stored.card else self._inside.nbytes(stored.data)

    def _read(self, name: str, start: int, nbytes: int, check: int) -> bytes:
        raw = self._run(name, lambda: self._inside.read(name, start, nbytes))
        if len(raw) != nbytes or xxhash.xxh3_64_intdigest(raw) != check:
            raise CorruptSlot(f"the index of {self._inside.path}/{name} is damaged", step=self._listed.step)
        return raw

    def places(self, rank: int) -> Places:
        """Read where everything is in the file of a rank: only that part of its index."""
        if rank in self._indexes:
            return self.index(rank)
        its = self._files[rank]
        with self._as_corrupt():
            self._card(rank)
            raw = self._read(its.card, its.places_start, its.places_nbytes, its.places_check)
        return decode_places(raw, its.data, its.data_nbytes)[0]

    def content(self, rank: int, name: str, place: Place, at_once: int = RUN_NBYTES) -> Iterator[np.ndarray]:
        its = self.index(rank)
        run = max(its.block_nbytes, at_once // its.block_nbytes * its.block_nbytes)
        for at in range(0, place.nbytes, run):
            end = min(place.nbytes, at + run)
            if place.packed:
                raw = self._unpacked(its, name, place.nbytes // place.rows, at, end)
            else:
                raw = self._read_part(its.data, place.start + at, end - at)
            self._check(its, place, name, at, raw, end - at)
            yield raw

    def fetch(self, runs: Sequence[Run], its: Places) -> Iterator[int]:
        """Read from a file what some runs need, in the order of the file; yield the number of bytes each time."""
        size = its.block_nbytes
        done, needed = 0, sum(run.target.nbytes for run in runs)
        batch: list[tuple[Run, int, int]] = []
        bounds = [run.bounds for run in runs]
        starts = [(run.place.packed, run.place.start + low) for run, (low, _) in zip(runs, bounds, strict=True)]
        for nth in sorted(range(len(runs)), key=starts.__getitem__):
            run, (low, high) = runs[nth], bounds[nth]
            low, high = low // size * size, min(run.place.nbytes, blocks(high, size) * size)
            if run.place.packed:
                row = run.target.shape[-1] * math.prod(run.shape[1:])
                raw = self._unpacked(its, run.name, row, low, high, (done, needed))
                self._check_and_fill(its, run, low, raw, high - low)
                done += run.target.nbytes
                yield high - low
                continue
            if batch and not self._joins(batch, run.place.start + low, run.place.start + high):
                yield self._fetch_at_once(its, batch, (done, needed))
                done += sum(run.target.nbytes for run, _, _ in batch)
                batch = []
            batch.append((run, low, high))
        if batch:
            yield self._fetch_at_once(its, batch, (done, needed))

    def _joins(self, batch: list[tuple[Run, int, int]], low: int, high: int) -> bool:
        """Whether bytes of the file are read together with those of a batch, which begin before them."""
        first = batch[0][0].place.start + batch[0][1]
        run, _, last = batch[-1]
        return low - run.place.start - last <= _GAP_NBYTES and high - first <= RUN_NBYTES

    def _fetch_at_once(self, its: Places, batch: list[tuple[Run, int, int]], far: tuple[int, int]) -> int:
        first = batch[0][0].place.start + batch[0][1]
        last = max(run.place.start + high for run, _, high in batch)
        raw = self._read_part(its.data, first, last - first, far)
        for run, low, high in batch:
            at = run.place.start + low - first
            self._check_and_fill(its, run, low, raw[at : at + high - low], high - low)
        return last - first

    def _read_part(self, name: str, start: int, nbytes: int, far: tuple[int, int] = (0, 0)) -> np.ndarray:
        raw = self._run(name, lambda: self._inside.read(name, start, nbytes), *far)
        return np.frombuffer(raw, dtype=np.uint8)

    def _check_and_fill(self, its: Places, run: Run, low: int, raw: np.ndarray, nbytes: int) -> None:
        self._check(its, run.place, run.name, low, raw, nbytes)
        first, last = run.bounds
        run.fill(raw[first - low : last - low])

    def _check(self, its: Places, place: Place, name: str, low: int, raw: np.ndarray, nbytes: int) -> None:
        """Check whole blocks of a place; ``low`` is where they begin there."""
        size = its.block_nbytes
        wanted = its.checks[place.first_check + low // size :]
        for number, at in enumerate(range(0, nbytes, size)):
            if raw.nbytes != nbytes or xxhash.xxh3_64_intdigest(raw[at : at + size].data) != int(wanted[number]):
                raise CorruptSlot(f"block {low // size + number} is damaged in {self._inside.path}/{its.data}",
                                  tensor=name, step=self._listed.step)  # fmt: skip

    def _unpacked(self, its: Places, name: str, row: int, low: int, high: int, far: tuple[int, int] = (0, 0)
                  ) -> np.ndarray:  # fmt: skip
        """Read bytes of rows that HDF5 has compressed; each row has so many bytes."""
        first, last = low // row, -(-high // row)
        raw = self._run(its.data, lambda: self._read_rows(its, name, row, first, last), *far)
        return raw[low - first * row : high - first * row]

    def _read_rows(self, its: Places, name: str, row: int, first: int, last: int) -> np.ndarray:
        from ..drain import hdf5_files

        try:
            if its.data not in self._open:
                file = self._inside.open(its.data)
                self._open[its.data] = (hdf5_files.open_file(file), file)
            dataset = self._open[its.data][0]["tensors"][hdf5_files.dataset_name(name)]
            return hdf5_files.read_rows(dataset, first, last, (last - first) * row)
        except Exception as error:  # HDF5 may raise anything if a file is damaged or a plugin is missing
            if its.data in self._open and (missing := hdf5_files.missing_filters(self._open[its.data][0])):
                raise ConfigError(f"{self._inside.path}/{its.data} cannot be read here: its compression "
                                  f"({', '.join(missing)}) is not installed: {pip_install('compression')}",
                                  tensor=name, step=self._listed.step) from None  # fmt: skip
            raise CorruptSlot(f"HDF5 cannot read {self._inside.path}/{its.data}: {error}", tensor=name,
                              step=self._listed.step) from None  # fmt: skip
