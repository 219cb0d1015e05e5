"""What a drained file says about itself: the card in its first bytes, and the index that the card points at.

A rank's file begins with its card; so does the file that commits a checkpoint. The card says who wrote the file: a file
without a card is never deleted. The index says where rows of which leaves are in this file, with a checksum for each
block of them. After that it has the manifest of the rank's slot as it was; a reader that knows the shapes reads only
the first part. Everything is validated before anything is allocated or touched.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from ..errors import CorruptSlot
from ..memory.slot import Attempt
from ..state import manifest
from ..state.leaves import Entry, ties_of
from ..state.manifest import Manifest
from ..state.old_ranks import MOST

MAGIC = b"MLFDRAIN"
VERSION = 1
CARD_NBYTES = 512
# magic, version, master, mark of a fresh start | run id, generation, step | rank, world size | bytes of the file;
# start, bytes and checksum of the index; unix ns | owner
_CARD = struct.Struct("<8sHHI 16sQq II QQQQQ 96s")
_SUM = struct.Struct("<Q")
_HEAD = struct.Struct("<QQQQ")  # bytes per checksum, numbers of records and of checksums, bytes of the slot's payload
_RECORD = np.dtype([("leaf", "<u4"), ("packed", "<u4"), ("start", "<u8"), ("nbytes", "<u8"), ("begin", "<u8"),
                    ("rows", "<u8"), ("first_check", "<u8")])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Card:
    """The first bytes of a drained file."""

    attempt: Attempt
    step: int
    rank: int  # whose file this is; -1: the file that commits the checkpoint
    world_size: int
    file_nbytes: int
    index_start: int
    index_nbytes: int
    index_check: int
    unix_ns: int
    owner: str  # which job wrote it, see `config.Config.owner`
    mark: int = 0  # mark of what was drained, see `slot.Header`

    def pack(self) -> bytes:
        body = _CARD.pack(
            MAGIC, VERSION, int(self.rank < 0), self.mark, self.attempt.run_id, self.attempt.generation, self.step,
            max(0, self.rank), self.world_size, self.file_nbytes, self.index_start, self.index_nbytes,
            self.index_check, self.unix_ns, self.owner.encode(),
        )  # fmt: skip
        return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(CARD_NBYTES, b"\0")


def read_card(raw: bytes) -> Card:
    """Decode and check the first `CARD_NBYTES` of a file. Raises CorruptSlot."""
    if raw[:8] != MAGIC:
        raise CorruptSlot("this file was not drained by mlflash", expected=MAGIC, found=raw[:8])
    body, rest = raw[: _CARD.size], raw[_CARD.size : _CARD.size + _SUM.size]
    if len(rest) != _SUM.size or xxhash.xxh3_64_intdigest(body) != _SUM.unpack(rest)[0]:
        raise CorruptSlot("the first bytes of a drained file are damaged: their checksum does not match")
    (_, version, master, mark, run_id, generation, step, rank, world_size, file_nbytes, start, nbytes, check, unix_ns,
     owner) = _CARD.unpack(body)  # fmt: skip
    if version != VERSION:
        raise CorruptSlot("this file was drained in another format", expected=VERSION, found=version)
    if rank >= world_size or master > 1 or start + nbytes > file_nbytes:
        raise CorruptSlot("the first bytes of a drained file contradict themselves")
    return Card(Attempt(run_id, generation), step, -1 if master else rank, world_size, file_nbytes, start, nbytes,
                check, unix_ns, owner.rstrip(b"\0").decode(errors="replace"), mark)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stored:
    """The files of one rank."""

    card: str  # the file with card and index
    nbytes: int  # nbytes, index_check: its size and the checksum of its index when the checkpoint was committed
    index_check: int
    data: str  # the file with the pieces, which may be the same
    data_nbytes: int
    places_start: int = 0  # places_...: the part of the index that says where everything is, and its checksum
    places_nbytes: int = 0
    places_check: int = 0

    @classmethod
    def of(cls, name: str, card: Card, data: str, data_nbytes: int, places: bytes) -> Stored:
        check = xxhash.xxh3_64_intdigest(places)
        return cls(name, card.file_nbytes, card.index_check, data, data_nbytes, card.index_start, len(places), check)


class Place(NamedTuple):
    """Where some rows of a leaf are in a file."""

    start: int
    nbytes: int
    begin: int  # begin, rows: the first row, and their number; 0 and 1 for a leaf without dimensions
    rows: int
    first_check: int  # number of the checksum of the first block
    packed: bool  # whether HDF5 has compressed them, in chunks; then ``start`` means nothing


@dataclasses.dataclass(frozen=True)
class Places:
    """Where everything is in a rank's file: all that a reader needs if it knows the shapes."""

    data: str
    block_nbytes: int  # bytes per checksum; the rows of each leaf begin a new block
    checks: np.ndarray  # XXH3-64 of each block, ``(blocks,)`` uint64
    of: Mapping[int, Place]

    def check(self, place: Place) -> int:
        mine = self.checks[place.first_check :][: blocks(place.nbytes, self.block_nbytes)]
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(mine).view(np.uint8).data)


@dataclasses.dataclass(frozen=True)
class Index:
    """What a rank's file holds."""

    manifest: Manifest  # the manifest of the rank's slot, as it was there
    places: Places

    @property
    def pieces(self) -> Iterator[tuple[Entry, Place]]:
        """The parts of tensors that are in the file, as entries whose ``start`` is where they begin in it."""
        for number, place in self.places.of.items():
            entry = self.manifest.entries[number]
            yield dataclasses.replace(rows_of(entry, place.begin, place.rows), start=place.start), place


def rows_of(entry: Entry, begin: int, rows: int) -> Entry:
    """Some rows of a tensor, as an entry; for a tensor without dimensions, all of it."""
    if not entry.shape:
        return entry
    nbytes = entry.nbytes // max(1, entry.shape[0]) * rows
    return dataclasses.replace(entry, offset=(entry.offset[0] + begin, *entry.offset[1:]),
                               shape=(rows, *entry.shape[1:]), nbytes=nbytes)  # fmt: skip


def first_names(entries: Sequence[Entry]) -> tuple[str, ...]:
    """For each entry its name, or the name of the first entry that is tied to it."""
    return tuple(entries[first].name for first in ties_of(entries))


def numbers_of(entries: Sequence[Entry]) -> dict[str, int]:
    """The number of the first entry of each name."""
    return {entry.name: number for number, entry in reversed([*enumerate(entries)])}


def blocks(nbytes: int, block_nbytes: int) -> int:
    """How many blocks a number of bytes takes."""
    return -(-nbytes // block_nbytes)


def encode(raw_manifest: bytes, payload_nbytes: int, places: Places) -> tuple[bytes, int]:
    """Encode an index; return it, and how many of its bytes `decode_places` reads."""
    records = np.array([(leaf, its.packed, its.start, its.nbytes, its.begin, its.rows, its.first_check)
                        for leaf, its in places.of.items()], dtype=_RECORD)  # fmt: skip
    checks = places.checks.astype("<u8")
    head = _HEAD.pack(places.block_nbytes, len(records), len(checks), payload_nbytes)
    text = head + records.tobytes() + checks.tobytes()
    return text + raw_manifest, len(text)


def decode_places(raw: bytes, data: str, data_nbytes: int) -> tuple[Places, int]:
    """Read the first part of an index and check every number in it; return it, and where the manifest begins."""
    try:
        block_nbytes, count, sums, _ = _HEAD.unpack_from(raw)
        end = _HEAD.size + count * _RECORD.itemsize + sums * 8
        if not 0 < block_nbytes <= MOST or end > len(raw):
            raise ValueError(f"{count} records and {sums} checksums of {block_nbytes} bytes in {len(raw)}")
        records = np.frombuffer(raw, dtype=_RECORD, count=count, offset=_HEAD.size)
        checks = np.frombuffer(raw, dtype="<u8", count=sums, offset=end - sums * 8)
        if any((records[name] > MOST).any() for name in ("start", "nbytes", "begin", "rows", "first_check")):
            raise ValueError("a number that is no size")
        packed = records["packed"]
        if (packed > 1).any() or (~(packed > 0) & (records["start"] + records["nbytes"] > data_nbytes)).any():
            raise ValueError("rows that are not in the file")
        if (records["first_check"] + -(-records["nbytes"].astype("<i8") // block_nbytes) > sums).any():
            raise ValueError("rows without checksums")
        if len(np.unique(records["leaf"])) != count:
            raise ValueError("rows of a leaf in two places")
        found = {leaf: Place(start, nbytes, begin, rows, first, bool(is_packed))
                 for leaf, is_packed, start, nbytes, begin, rows, first in records.tolist()}  # fmt: skip
    except (ValueError, struct.error) as error:
        raise CorruptSlot(f"the index of a drained file is damaged: {error}") from None
    return Places(data, block_nbytes, checks, found), end


def decode(raw: bytes, data: str, data_nbytes: int) -> Index:
    """Read an index and check every number in it; see `decode_places`."""
    places, end = decode_places(raw, data, data_nbytes)
    held = manifest.decode(raw[end:], _HEAD.unpack_from(raw)[3])
    for number, place in places.of.items():
        entry = held.entries[number] if number < len(held.entries) else None
        if entry is None or not are_rows(place, entry.shape, entry.nbytes):
            raise CorruptSlot("the index of a drained file is damaged: rows of no tensor")
        if place.packed and not (entry.shape and place.nbytes):
            raise CorruptSlot("the index of a drained file is damaged: rows that cannot be compressed")
    return Index(held, places)


def are_rows(place: Place, shape: tuple[int, ...], nbytes: int) -> bool:
    """Whether a place can hold rows of a leaf of so many bytes."""
    of = shape[0] if shape else 1
    return place.begin + place.rows <= of and place.nbytes * of == nbytes * place.rows
