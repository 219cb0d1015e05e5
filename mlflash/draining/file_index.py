"""What a drained file says of itself: the card in its first bytes, and the index that the card points at.

A rank's file begins with its card; so does the file that commits a checkpoint. The card says who wrote it: nothing
without one is ever deleted. The index has the manifest of the rank's slot as it was, the pieces of tensors that lie in
this file, and a checksum for each block of them. Both are validated before anything is allocated or touched.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..errors import CorruptSlot
from ..memory.slot_header import Attempt
from ..state import manifest
from ..state.leaves import Entry
from ..state.manifest import Manifest

MAGIC = b"MLFDRAIN"
VERSION = 1
CARD_NBYTES = 512
# magic, version, master, mark of a fresh start | run id, generation, step | rank, world size | file bytes, start of
# the index, its bytes, its checksum, unix ns | owner
_CARD = struct.Struct("<8sHHI 16sQq II QQQQQ 96s")
_SUM = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Card:
    """The first bytes of a drained file.

    Attributes:
        attempt, step: of what was drained.
        rank: whose file this is; -1: the file that commits the checkpoint.
        world_size: ranks of the checkpoint.
        file_nbytes: size of the file.
        index_start, index_nbytes, index_check: where the index is, and its XXH3-64.
        unix_ns: when it was written, ns since 1970.
        owner: which job wrote it, see `config.Config.owner`.
        mark: of what was drained, see `slot_header.Header`.
    """

    attempt: Attempt
    step: int
    rank: int
    world_size: int
    file_nbytes: int
    index_start: int
    index_nbytes: int
    index_check: int
    unix_ns: int
    owner: str
    mark: int = 0

    def pack(self) -> bytes:
        """Encode; the result is `CARD_NBYTES` long."""
        body = _CARD.pack(
            MAGIC, VERSION, int(self.rank < 0), self.mark, self.attempt.run_id, self.attempt.generation, self.step,
            max(0, self.rank), self.world_size, self.file_nbytes, self.index_start, self.index_nbytes,
            self.index_check, self.unix_ns, self.owner.encode(),
        )  # fmt: skip
        return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(CARD_NBYTES, b"\0")


def read_card(raw: bytes) -> Card:
    """Decode and check a card.

    Not collective.

    Args:
        raw: the first `CARD_NBYTES` of a file.

    Raises:
        CorruptSlot: this is none, or of another version, or damaged.
    """
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
class Piece:
    """A part of a tensor in a rank's file.

    Attributes:
        entry: which; ``start`` is where its bytes begin in the file.
        common: the lowest of the ranks that hold the tensor alike, of whom each stores a part; -1: the rank's own.
        first_check: number of the checksum of its first block.
        packed: whether HDF5 has compressed it, in chunks; ``start`` says nothing then.
    """

    entry: Entry
    common: int
    first_check: int
    packed: bool = False


@dataclasses.dataclass(frozen=True)
class Index:
    """What a rank's file holds.

    Attributes:
        manifest: of the rank's slot, as it was there.
        commons: for each entry of it the `Piece.common` of the pieces that make it up.
        data: name of the file with the pieces.
        pieces: in the order of their places.
        block_nbytes: bytes per checksum; each piece begins a new block.
        checks: XXH3-64 of each block, ``(blocks,)`` uint64.
    """

    manifest: Manifest
    commons: tuple[int, ...]
    data: str
    pieces: tuple[Piece, ...]
    block_nbytes: int
    checks: np.ndarray

    def check(self, piece: Piece) -> int:
        """One number for the bytes of a piece."""
        mine = self.checks[piece.first_check :][: blocks(piece.entry.nbytes, self.block_nbytes)]
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(mine).view(np.uint8).data)


    def places(self) -> Places:
        """Where the rows of each leaf are."""
        numbers = {entry.name: number for number, entry in reversed([*enumerate(self.manifest.entries)])}
        found = {}
        for piece in self.pieces:
            number, its = numbers[piece.entry.name], piece.entry
            whole = self.manifest.entries[number]
            begin = its.offset[0] - whole.offset[0] if its.shape else 0
            rows = its.shape[0] if its.shape else 1
            found[number] = Place(its.start, its.nbytes, begin, rows, piece.first_check, piece.packed)
        return Places(self.data, self.block_nbytes, self.checks, found)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where some rows of a leaf are in a file.

    Attributes:
        start, nbytes: of them in the file.
        begin, rows: the first of them, and how many; 0 and 1 of a leaf without dimensions.
        first_check, packed: see `Piece`.
    """

    start: int
    nbytes: int
    begin: int
    rows: int
    first_check: int
    packed: bool


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a rank's file has what.

    Attributes:
        data, block_nbytes, checks: see `Index`.
        of: by number of the leaf.
    """

    data: str
    block_nbytes: int
    checks: np.ndarray
    of: Mapping[int, Place]


def first_names(entries: Sequence[Entry]) -> tuple[str, ...]:
    """For each entry its name, or that of the first one that is tied to it."""
    firsts: dict[Entry, str] = {}
    return tuple(
        firsts.setdefault(dataclasses.replace(entry, name=""), entry.name) if entry.nbytes else entry.name
        for entry in entries
    )


def blocks(nbytes: int, block_nbytes: int) -> int:
    """How many blocks some bytes take."""
    return -(-nbytes // block_nbytes)


def encode(raw_manifest: bytes, payload_nbytes: int, commons: Sequence[int], data: str, pieces: Sequence[Piece],
           block_nbytes: int, checks: np.ndarray) -> bytes:  # fmt: skip
    """Encode an index; ``raw_manifest`` is the document in the slot, see `manifest`."""
    rest = {
        "payload_nbytes": payload_nbytes,
        "commons": list(commons),
        "data": data,
        "pieces": [
            [*dataclasses.astuple(piece.entry), piece.common, piece.first_check, int(piece.packed)] for piece in pieces
        ],
        "block_nbytes": block_nbytes,
        "checks": checks.astype("<u8").tobytes().hex(),
    }
    return b'{"manifest":%s,%s' % (raw_manifest, json.dumps(rest, separators=(",", ":")).encode()[1:])


def decode(raw: bytes, file_nbytes: int) -> Index:
    """Read an index and check every number in it.

    Not collective.

    Args:
        raw: the bytes of the document.
        file_nbytes: size of the file that its pieces must lie in.

    Raises:
        CorruptSlot: it is not an index; the text says what is wrong first.
    """
    try:
        document = json.loads(raw)
        held = manifest.from_document(document["manifest"], _whole(document["payload_nbytes"]))
        commons = tuple(_number(n) for n in document["commons"])
        if len(commons) != len(held.entries):
            raise ValueError(f"{len(commons)} sources for {len(held.entries)} entries")
        block_nbytes = _whole(document["block_nbytes"])
        checks = np.frombuffer(bytes.fromhex(document["checks"]), dtype="<u8")
        if not block_nbytes:
            raise ValueError("blocks without bytes")
        pieces = tuple(_piece(fields, file_nbytes, block_nbytes, checks.size) for fields in document["pieces"])
        _check_pieces(held, commons, pieces)
        data = document["data"]
        if not isinstance(data, str) or "/" in data or data.startswith("."):
            raise ValueError(f"the name of the file is {data!r}")
        return Index(held, commons, data, pieces, block_nbytes, checks)
    except manifest.BAD_DOCUMENT as error:
        raise CorruptSlot(f"the index of a drained file is damaged: {error!r}") from None


def _piece(fields: Any, file_nbytes: int, block_nbytes: int, checks: int) -> Piece:
    *entry, common, first_check, packed = fields
    # What is compressed may have more bytes than the file.
    place = manifest.decode_entry(entry, max(file_nbytes, _whole(entry[-1])) if packed else file_nbytes)
    piece = Piece(place, _number(common), _whole(first_check), bool(_whole(packed)))
    if packed and not (place.shape and place.nbytes):
        raise ValueError(f"piece {place.name!r} cannot be compressed")
    if piece.first_check + blocks(piece.entry.nbytes, block_nbytes) > checks:
        raise ValueError(f"piece {piece.entry.name!r} has no checksums")
    return piece


def _check_pieces(held: Manifest, commons: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Each piece is of a tensor of the manifest, and there is one of each tensor that the rank alone holds."""
    entries = {entry.name: entry for entry in held.entries}
    for piece in pieces:
        of, its = entries[piece.entry.name], piece.entry
        if (of.kind, of.dtype, of.global_shape) != (its.kind, its.dtype, its.global_shape) or not _are_rows(its, of):
            raise ValueError(f"piece {its.name!r} is not of the tensor of that name")
    own = {piece.entry.name for piece in pieces if piece.common < 0}
    for name, common in zip(first_names(held.entries), commons, strict=True):
        if common < 0 and name not in own:
            raise ValueError(f"there is no piece of {name!r}")


def _are_rows(piece: Entry, of: Entry) -> bool:
    """Whether a piece is some rows of a tensor, or all of it."""
    if not of.shape:
        return not piece.shape
    before, behind = piece.offset[0] - of.offset[0], of.offset[0] + of.shape[0] - piece.offset[0] - piece.shape[0]
    return before >= 0 <= behind and (piece.offset[1:], piece.shape[1:]) == (of.offset[1:], of.shape[1:])


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or value < -1:
        raise ValueError(f"{value!r} is no rank")
    return value
