"""The indexes of files that were drained before format version 2: JSON documents, read as that version wrote them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CorruptSlot
from ..state import manifest
from ..state.leaves import Entry
from ..state.manifest import Manifest
from .checkpoint_directory import FILE_NAME
from .file_index import Index, Place, Places, Stored, blocks, first_names, numbers_of


@dataclasses.dataclass(frozen=True)
class IndexVersion1(Index):
    """What a rank's file holds.

    Attributes:
        commons: for each entry of the manifest, the lowest of the ranks whose files have the rows of it; -1: its own.
        common_of: for each leaf of which there are rows in this file, the lowest of the ranks that hold it alike.
    """

    commons: tuple[int, ...]
    common_of: Mapping[int, int]


def decode(raw: bytes, file_nbytes: int) -> IndexVersion1:
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
        pieces = [_piece(fields, file_nbytes, block_nbytes, checks.size) for fields in document["pieces"]]
        _check_pieces(held, commons, pieces)
        data = document["data"]
        if not isinstance(data, str) or "/" in data or data.startswith("."):
            raise ValueError(f"the name of the file is {data!r}")
        numbers = numbers_of(held.entries)
        found = {numbers[piece.entry.name]: piece for piece in pieces}
        places = {number: _place(piece, held.entries[number]) for number, piece in found.items()}
        common_of = {number: piece.common for number, piece in found.items()}
        return IndexVersion1(held, Places(data, block_nbytes, checks, places), commons, common_of)
    except manifest.BAD_DOCUMENT as error:
        raise CorruptSlot(f"the index of a drained file is damaged: {error!r}") from None


@dataclasses.dataclass(frozen=True)
class _Piece:
    entry: Entry
    common: int
    first_check: int
    packed: bool


def _place(piece: _Piece, of: Entry) -> Place:
    its = piece.entry
    begin, rows = (its.offset[0] - of.offset[0], its.shape[0]) if its.shape else (0, 1)
    return Place(its.start, its.nbytes, begin, rows, piece.first_check, piece.packed)


def _piece(fields: Any, file_nbytes: int, block_nbytes: int, checks: int) -> _Piece:
    *entry, common, first_check, packed = fields
    # Compressed tensors may have more bytes than the file.
    place = manifest.decode_entry(entry, max(file_nbytes, _whole(entry[-1])) if packed else file_nbytes)
    piece = _Piece(place, _number(common), _whole(first_check), bool(_whole(packed)))
    if packed and not (place.shape and place.nbytes):
        raise ValueError(f"piece {place.name!r} cannot be compressed")
    if piece.first_check + blocks(piece.entry.nbytes, block_nbytes) > checks:
        raise ValueError(f"piece {piece.entry.name!r} has no checksums")
    return piece


def _check_pieces(held: Manifest, commons: Sequence[int], pieces: Sequence[_Piece]) -> None:
    """Check that pieces belong to tensors of the manifest, and that each tensor that only this rank holds has one."""
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


def read_files(raw: bytes, world_size: int) -> list[Stored]:
    """Read from the index of format version 1 which files a checkpoint has, by rank.

    Not collective.

    Raises:
        CorruptSlot: it is not an index.
    """
    try:
        files = [_stored(fields) for fields in json.loads(raw)["files"]]
        if len(files) != world_size:
            raise ValueError(f"{len(files)} files of {world_size} ranks")
    except manifest.BAD_DOCUMENT as error:
        raise CorruptSlot(f"the index of the file that commits a checkpoint is damaged: {error!r}") from None
    return files


def _stored(fields: Any) -> Stored:
    stored = Stored(*fields)
    for name in (stored.card, stored.data):
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a drained file")
    if not all(type(n) is int and n >= 0 for n in (stored.nbytes, stored.index_check, stored.data_nbytes)):
        raise ValueError(f"the size or checksum of {stored.card} makes no sense")
    return stored
