"""The index of a drained checkpoint: what its files say about themselves, and about what all ranks hold.

A rank's file begins with its card; so does the file that commits a checkpoint. The card says who wrote the file: a file
without a card is never deleted. It points at the index of the file.

- The index of a rank's file says where rows of which leaves are in it, with a checksum for each block of them. After
  that it has the manifest of the rank's slot as it was; a reader that knows the shapes reads only the first part.
- The index of the file that commits a checkpoint is the table of what all ranks hold, and in which files.

Everything is validated before anything is allocated or touched.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from ..channel.describe_ranks import Gathered
from ..errors import CorruptSlot
from ..memory.slot import Attempt
from ..state import manifest
from ..state.leaves import Entry, ties_of
from ..state.manifest import Manifest
from ..state.old_ranks import MOST, Group, RankStructure, structure_from_document
from ..state.plain_values import check_plain

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
_COUNT = struct.Struct("<Q")
_FILE = ("nbytes", "index_check", "data_nbytes", "places_start", "places_nbytes", "places_check")
_SIZES = (0, 2, 3, 4)  # positions of those fields that are not checksums


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
class RankFiles:
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
    def of(cls, name: str, card: Card, data: str, data_nbytes: int, places: bytes) -> RankFiles:
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
        checks = self.checks[place.first_check :][: blocks(place.nbytes, self.block_nbytes)]
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(checks).view(np.uint8).data)


@dataclasses.dataclass(frozen=True)
class Index(Places):
    """What a rank's file holds."""

    manifest: Manifest  # the manifest of the rank's slot, as it was there

    @property
    def pieces(self) -> Iterator[tuple[Entry, Place]]:
        """The parts of tensors that are in the file, as entries whose ``start`` is where they begin in it."""
        for number, place in self.of.items():
            entry = self.manifest.entries[number]
            yield msgspec.structs.replace(rows_of(entry, place.begin, place.rows), start=place.start), place


def rows_of(entry: Entry, begin: int, rows: int) -> Entry:
    """Some rows of a tensor, as an entry; for a tensor without dimensions, all of it."""
    if not entry.shape:
        return entry
    nbytes = entry.nbytes // max(1, entry.shape[0]) * rows
    return msgspec.structs.replace(entry, offset=(entry.offset[0] + begin, *entry.offset[1:]),
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


def encode_index(raw_manifest: bytes, payload_nbytes: int, places: Places) -> tuple[bytes, int]:
    """Encode the index of a rank's file; return it, and how many of its bytes `decode_places` reads."""
    records = np.array([(leaf, place.packed, place.start, place.nbytes, place.begin, place.rows, place.first_check)
                        for leaf, place in places.of.items()], dtype=_RECORD)  # fmt: skip
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
        of_leaf = {leaf: Place(start, nbytes, begin, rows, first, bool(is_packed))
                   for leaf, is_packed, start, nbytes, begin, rows, first in records.tolist()}  # fmt: skip
    except (ValueError, struct.error) as error:
        raise CorruptSlot(f"the index of a drained file is damaged: {error}") from None
    return Places(data, block_nbytes, checks, of_leaf), end


def decode_index(raw: bytes, data: str, data_nbytes: int) -> Index:
    """Read the index of a rank's file and check every number in it; see `decode_places`."""
    places, end = decode_places(raw, data, data_nbytes)
    held = manifest.decode(raw[end:], _HEAD.unpack_from(raw)[3])
    for number, place in places.of.items():
        entry = held.entries[number] if number < len(held.entries) else None
        rows = entry.shape[0] if entry is not None and entry.shape else 1
        if entry is None or place.begin + place.rows > rows or place.nbytes * rows != entry.nbytes * place.rows:
            raise CorruptSlot("the index of a drained file is damaged: rows of no tensor")
        if place.packed and not (entry.shape and place.nbytes):
            raise CorruptSlot("the index of a drained file is damaged: rows that cannot be compressed")
    return Index(places.data, places.block_nbytes, places.checks, places.of, held)


# What all ranks of a drained checkpoint hold, and in which files:
#
#    8 bytes      size of the JSON document that follows
#    document     {"format", "job", "groups": [[structure, plain leaves, ranks], ...], "differ", "plain_differ"}
#    files        for each rank 6 numbers of 64 bits, see `_FILE`
#    dealt        for each rank 3 signed numbers, see `RankTable.dealt`
#    groups       for each group its ranks, and a row of numbers for each of them, see `state.old_ranks`
#
# What several ranks hold alike lies in their files one after the other, in runs of rows. Where each of them begins says
# which run is whose. So the table takes a few hundred bytes for a rank, and nobody needs another rank's index to find
# these rows.


@dataclasses.dataclass(frozen=True)
class RankTable:
    """What all ranks of a checkpoint hold.

    Attributes:
        groups, differ, plain_differ: see `old_ranks.OldRanks`.
        dealt: for each rank the lowest rank of its set, or -1; and where it begins, in bytes, in what all ranks hold
            alike and in what the set shares, ``(ranks, 3)`` int64.
    """

    groups: list[Group]
    differ: frozenset[str]
    plain_differ: frozenset[str]
    files: list[RankFiles]
    dealt: np.ndarray

    _begins: dict[int, tuple[np.ndarray, np.ndarray, list[int]]] = dataclasses.field(default_factory=dict, repr=False)

    def holders(self, rank: int, structure: RankStructure, row: np.ndarray, number: int, begin: int, end: int
                ) -> list[int]:  # fmt: skip
        """The ranks whose files may have these rows of a leaf of a rank."""
        alike, shared = structure.places
        if number in alike:
            members, begins, firsts = self._runs(-1, structure, row, structure.alike)
            nth = alike[number]
        elif number in shared:
            members, begins, firsts = self._runs(int(self.dealt[rank, 0]), structure, row, structure.shared)
            nth = shared[number]
        else:
            return [rank]
        row_nbytes = (firsts[nth + 1] - firsts[nth]) // max(1, next(iter(structure.shape(row, number)), 1))
        first, last = firsts[nth] + begin * row_nbytes, firsts[nth] + end * row_nbytes
        low, high = int(np.searchsorted(begins, first, "right")) - 1, int(np.searchsorted(begins, last, "left"))
        return [int(member) for member in members[max(0, low) : high]]

    def _runs(self, by: int, structure: RankStructure, row: np.ndarray, leaves: Sequence[int]
              ) -> tuple[np.ndarray, np.ndarray, list[int]]:  # fmt: skip
        """The ranks of a set (-1: all), where each begins, and where each of the leaves does."""
        if by not in self._begins:
            members = np.arange(len(self.dealt)) if by < 0 else np.flatnonzero(self.dealt[:, 0] == by)
            firsts = list(itertools.accumulate((structure.nbytes(row, number) for number in leaves), initial=0))
            self._begins[by] = members, self.dealt[members, 1 if by < 0 else 2], firsts
        return self._begins[by]


def encode_table(form: str, job: str, files: Sequence[RankFiles], gathered: Gathered) -> bytes:
    """Encode a table. ``more`` has each rank's row of `RankTable.dealt`, with -1 where nothing was dealt to it."""
    groups = [[group.structure.document, group.plain, len(group.ranks)] for group in gathered.groups]
    document = {"format": form, "job": job, "groups": groups, "differ": sorted(gathered.differ),
                "plain_differ": sorted(gathered.plain_differ)}  # fmt: skip
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    listed = np.array([[getattr(stored, name) for name in _FILE] for stored in files], dtype="<u8")
    dealt = _filled(np.array([gathered.more[rank] for rank in range(len(files))], dtype="<i8"))
    rows = [part for group in gathered.groups for part in (group.ranks, group.rows)]
    return b"".join([_COUNT.pack(len(text)), text, *(part.astype(part.dtype.newbyteorder("<")).tobytes()
                                                     for part in (listed, dealt, *rows))])  # fmt: skip


def _filled(dealt: np.ndarray) -> np.ndarray:
    """Let a rank to which nothing was dealt begin where the next one of its set does, or at the end."""
    filled: np.ndarray = dealt.copy()
    for column, sets in ((1, np.zeros(len(dealt), dtype=np.int64)), (2, dealt[:, 0])):
        for by in np.unique(sets):
            members, end = np.flatnonzero(sets == by), MOST
            for rank in members[::-1]:
                end = filled[rank, column] = end if filled[rank, column] < 0 else filled[rank, column]
    return filled


def decode_table(raw: bytes, world_size: int) -> RankTable:
    """Read a table and check every number in it. Raises CorruptSlot."""
    try:
        (length,) = _COUNT.unpack_from(raw)
        document = json.loads(raw[_COUNT.size : _COUNT.size + length])
        numbers = _Numbers(raw, _COUNT.size + length)
        files = numbers.next_numbers(world_size, len(_FILE), "<u8")
        if (files[:, _SIZES] > MOST).any():
            raise ValueError("a file without a size")
        dealt = numbers.next_numbers(world_size, 3, "<i8")
        if (dealt < -1).any() or (dealt[:, 0] >= world_size).any() or (dealt[:, 1:] > MOST).any():
            raise ValueError("a rank begins nowhere")
        groups = [_group(fields, numbers, world_size) for fields in document["groups"]]
        ranks = np.sort(np.concatenate([group.ranks for group in groups]))
        if numbers.at != len(raw) or not np.array_equal(ranks, np.arange(world_size)):
            raise ValueError(f"not each of {world_size} ranks is there once")
        _check_order(groups, dealt)
        differ, plain_differ = (frozenset(_texts(document[name])) for name in ("differ", "plain_differ"))
        names = _names(document["format"])
        stored = [
            RankFiles(names[0] % rank, nbytes, check, names[1] % rank, *more)
            for rank, (nbytes, check, *more) in enumerate(files.tolist())
        ]
    except (*manifest.BAD_DOCUMENT, struct.error) as error:
        raise CorruptSlot(f"the index of the file that commits a checkpoint is damaged: {error!r}") from None
    return RankTable(groups, differ, plain_differ, stored, dealt)


def _names(form: Any) -> tuple[str, str]:
    return {"hdf5": ("rank-%05d.h5", "rank-%05d.h5"), "dcp": ("rank-%05d.mlflash", "__%d_0.distcp")}[form]


class _Numbers:
    def __init__(self, raw: bytes, at: int):
        self._raw, self.at = raw, at

    def next_numbers(self, rows: int, width: int, dtype: str) -> np.ndarray:
        nbytes = rows * width * 8
        if self.at + nbytes > len(self._raw):
            raise ValueError(f"{rows} x {width} numbers are not there")
        numbers = np.frombuffer(self._raw, dtype=dtype, count=rows * width, offset=self.at).reshape(rows, width)
        self.at += nbytes
        return numbers


def _group(fields: Any, numbers: _Numbers, world_size: int) -> Group:
    structure, plain, count = fields
    if type(count) is not int or not 0 < count <= world_size or not isinstance(plain, list):
        raise ValueError(f"a group of {count!r} ranks")
    for value in plain:
        check_plain(value)
    made = structure_from_document(structure, len(plain))
    ranks = numbers.next_numbers(count, 1, "<i8").reshape(-1)
    if (np.diff(ranks) <= 0).any():
        raise ValueError("ranks that do not ascend")
    rows = numbers.next_numbers(count, made.starts[-1], "<i8")
    made.check_rows(rows)
    return Group(made, ranks, rows, plain)


def _check_order(groups: Sequence[Group], dealt: np.ndarray) -> None:
    """Check that ranks have what they hold alike, or share in a set, in one order, and that parts are contiguous."""
    seen: dict[int, list[str]] = {}
    for group in groups:
        structure = group.structure
        alike, shared = ([structure.names[n] for n in leaves] for leaves in (structure.alike, structure.shared))
        sets = [(int(by), shared) for by in np.unique(dealt[group.ranks, 0]) if by >= 0]
        if any(seen.setdefault(by, names) != names for by, names in [(-1, alike), *sets]):
            raise ValueError("ranks that hold other tensors alike")
    order = np.lexsort((np.arange(len(dealt)), dealt[:, 0]))
    same = np.diff(dealt[order, 0]) == 0
    if (np.diff(dealt[:, 1]) < 0).any() or (same & (np.diff(dealt[order, 2]) < 0)).any():
        raise ValueError("a rank begins before the one before it")


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("a name that is no text")
    return value
