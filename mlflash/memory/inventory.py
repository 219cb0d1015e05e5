"""The sealed files that the nodes hold, as one table: each node lists its own, and all tables are joined."""

from __future__ import annotations

import dataclasses
import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..errors import CorruptSlot, UnsafePath
from .node_directory import NodeDirectory, file_number
from .slot import (
    RECORD_NBYTES,
    RESTORES_START,
    VERDICT_START,
    Attempt,
    Header,
    Kind,
    Verdict,
    pack_record,
    read_record,
    read_verdict,
    unpack,
)

FOUND = np.dtype(
    [("generation", "<u8"), ("run_0", "<u8"), ("run_1", "<u8"), ("step", "<i8"), ("rank", "<u4"),
     ("world_size", "<u4"), ("node", "<u4"), ("file", "<u4"), ("group", "<u4"), ("shared_by", "<i4"), ("kind", "u1"),
     ("number", "u1"), ("shares", "u1"), ("restores", "u1"), ("verdict", "u1")]
)  # fmt: skip
"""One sealed file: 61 bytes, so that 16,384 ranks with four files each fit into 4 MB.

``number``: how many may be lost, of parity; which share, of shared state, and ``shares`` how many there are. ``group``:
index of a parity group. ``shared_by``: the set of ranks whose shared state it is, or which this slot needs; -1: none.
``verdict``: see `slot.Verdict`.
"""
_ATTEMPT = ["generation", "run_0", "run_1", "step", "world_size"]
_RUN_ID = struct.Struct("<QQ")
_COUNT = struct.Struct("<Q")

Place = tuple[int, int]
"""Node and file number."""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """Sealed files of some nodes."""

    rows: np.ndarray  # one each, `FOUND`
    # the ranks of parity groups; rows["group"] of a parity file is an index into them
    groups: tuple[tuple[int, ...], ...] = ()

    def attempts(self) -> list[tuple[Attempt, int, int]]:
        """List the attempts as ``(attempt, step, world size)``, newest first."""
        # Sort by columns: np.unique compares rows field by field, which takes twenty times as long.
        order = np.lexsort([self.rows[name] for name in reversed(_ATTEMPT)])
        rows = self.rows[_ATTEMPT][order]
        unique = rows[np.concatenate([rows[:1] == rows[:1], rows[1:] != rows[:-1]])].tolist()
        return [(Attempt(_RUN_ID.pack(a, b), g), step, size) for g, a, b, step, size in reversed(unique)]

    def of(self, attempt: Attempt) -> Inventory:
        first, second = _RUN_ID.unpack(attempt.run_id)
        rows = self.rows
        of_attempt = (rows["generation"] == attempt.generation) & (rows["run_0"] == first) & (rows["run_1"] == second)
        return Inventory(rows[of_attempt], self.groups)

    @property
    def verdict(self) -> Verdict:
        return Verdict(int(self.rows["verdict"].max(initial=0)))

    def since(self, generation: int) -> Inventory:
        return Inventory(self.rows[self.rows["generation"] >= generation], self.groups)

    def on(self, node: int) -> Inventory:
        return Inventory(self.rows[self.rows["node"] == node], self.groups)

    def without(self, places: Iterable[Place]) -> Inventory:
        rows = self.rows
        for node, file in places:
            rows = rows[(rows["node"] != node) | (rows["file"] != file)]
        return Inventory(rows, self.groups)


def join(parts: Sequence[Inventory]) -> Inventory:
    """Put the inventories of several nodes together."""
    # Join the bytes at once: NumPy takes longer to inspect the fields of 16,384 small arrays than to copy all their
    # data.
    rows = np.frombuffer(bytearray(b"".join([part.rows.tobytes() for part in parts])), dtype=FOUND)
    groups: dict[tuple[int, ...], int] = {}
    every = itertools.chain.from_iterable(part.groups for part in parts)
    number_of = np.array([groups.setdefault(group, len(groups)) for group in every], dtype="<u4")
    first = np.cumsum([0, *(len(part.groups) for part in parts)])[:-1]
    parity = rows["kind"] == Kind.PARITY
    first_of_row = np.repeat(first, [part.rows.size for part in parts])[parity]
    rows["group"][parity] = number_of[first_of_row + rows["group"][parity]]
    return Inventory(rows, tuple(groups))


def encode(found: Inventory) -> bytes:
    """Encode an inventory, to send it to the other nodes.

    It is encoded column by column and compressed, because most of it repeats: the files of 8 ranks with rs:6+2 take 270
    bytes instead of the 2,400 of a pickle, and those of 16,384 ranks 0.5 MB instead of 5.
    """
    columns = np.frombuffer(found.rows.tobytes(), dtype=np.uint8).reshape(-1, FOUND.itemsize).T.tobytes()
    groups = np.array([word for group in found.groups for word in (len(group), *group)], dtype="<u4").tobytes()
    return zlib.compress(_COUNT.pack(found.rows.size) + columns + groups, 1)


def decode(packed: bytes) -> Inventory:
    """Decode what `encode` returned."""
    raw = zlib.decompress(packed)
    end = _COUNT.size + FOUND.itemsize * _COUNT.unpack_from(raw)[0]
    columns = np.frombuffer(raw[_COUNT.size : end], dtype=np.uint8).reshape(FOUND.itemsize, -1)
    words = iter(np.frombuffer(raw[end:], dtype="<u4").tolist())
    groups = tuple(tuple(itertools.islice(words, length)) for length in words)
    return Inventory(np.frombuffer(columns.T.tobytes(), dtype=FOUND), groups)


def first_pages(memory: NodeDirectory) -> Iterator[tuple[str, bytes, int]]:
    """Return for each slot file of this node its name, header and records as they are, and its size."""
    for name in memory.slot_names():
        try:
            fd = memory.open(name, os.O_RDONLY)
        except (UnsafePath, FileNotFoundError):
            continue
        try:
            page, nbytes = os.pread(fd, VERDICT_START + RECORD_NBYTES, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)
        yield name, page, nbytes


def scan(memory: NodeDirectory, node: int) -> Inventory:
    """List the sealed files of this node by their headers; files that are not private to this user are ignored."""
    found = []
    for name, page, nbytes in first_pages(memory):
        try:
            header = unpack(page)
        except CorruptSlot:
            continue
        if header.extents.nbytes <= nbytes:
            restores = read_record(page, RESTORES_START, header.attempt) or 0
            found.append((name, header, restores, read_verdict(page, header.attempt)))
    return of_headers(found, node)


def of_headers(found: Iterable[tuple[str, Header, int, int]], node: int) -> Inventory:
    """List sealed files of a node: for each, name and header, how many runs have restored it, and its verdict."""
    rows = []
    groups: dict[tuple[int, ...], int] = {}
    for name, header, restores, verdict in found:
        kind = header.kind
        group = groups.setdefault(header.group, len(groups)) if kind is Kind.PARITY else 0
        rows.append((
            header.attempt.generation, *_RUN_ID.unpack(header.attempt.run_id), header.step, header.rank,
            header.world_size, node, file_number(name), group, header.shared_by, kind,
            header.share if kind is Kind.SHARE else header.parities, len(header.group), min(restores, 255), verdict,
        ))  # fmt: skip
    return Inventory(np.array(rows, dtype=FOUND), tuple(groups))


def write_verdict(memory: NodeDirectory, step: int, verdict: Verdict) -> set[Attempt]:
    """Write a verdict into all sealed files of this node that hold a step; return the attempts that they hold.

    A live job may write such a file at the same time: then the record belongs to an attempt that is no
    longer in the file, and has no effect.
    """
    found = set()
    for name, page, _ in first_pages(memory):
        try:
            header = unpack(page)
        except CorruptSlot:
            continue
        if header.step != step:
            continue
        found.add(header.attempt)
        try:
            fd = memory.open(name, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            os.pwrite(fd, pack_record(VERDICT_START, header.attempt, verdict, time.time_ns()), VERDICT_START)
        finally:
            os.close(fd)
    return found
