"""What a slot holds ↔ bytes.

The manifest is one JSON document: ``{"entries": [...], "tree": [...], "plain": [...], "shared": [...]}``. Everything in
it is validated before anything is allocated or touched, so that a damaged or hostile file ends in `CorruptSlot`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import numpy as np

from .errors import CorruptSlot
from .plain import decode_plain
from .state import Entry, Tree

TORCH_ITEM_NBYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
         "float4_e2m1fn_x2", "bits8", "bits4x2", "bits2x4", "bits1x8"), 1,
    ),
    "bits16": 2,
}  # fmt: skip
"""The torch dtypes a slot can hold and their bytes per element."""

# What dtype.str of an array without fields can be. np.dtype() must not see anything else: it evaluates parts of it.
_ARRAY_DTYPE = re.compile(r"[<>|](?:[biufcSUV]\d{1,9}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)")
MAX_DEPTH = 200
BAD_DOCUMENT = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError)
"""What reading a damaged or hostile JSON document can raise."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """State that a slot's rank shares with others, and which lies in files of its own.

    Attributes:
        by: the lowest of these ranks.
        shares: how many files it lies in, on each node.
        nbytes: of it.
    """

    by: int
    shares: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a slot holds: the entries, and the tree that puts them together again.

    Attributes:
        shared: where the entries are whose start is behind the payload; None where there are none.
    """

    entries: tuple[Entry, ...]
    tree: Tree
    plain: list[Any]
    shared: Shared | None = None


def encode_entries(entries: tuple[Entry, ...]) -> bytes:
    """Encode the part that stays the same from save to save."""
    return _json([list(dataclasses.astuple(entry)) for entry in entries])


def encode_tree(tree: Tree) -> bytes:
    """Encode the tree, which stays the same as long as the structure does."""
    return _json(tree)


def join(entries: bytes, tree: bytes, plain: list[Any], shared: Shared | None = None) -> bytes:
    """Put a manifest together from its encoded parts and the plain leaves of this save."""
    more = b"" if shared is None else b',"shared":%s' % _json(list(dataclasses.astuple(shared)))
    return b'{"entries":%s,"tree":%s,"plain":%s%s}' % (entries, tree, _json(plain), more)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode(raw: bytes, payload_nbytes: int) -> Manifest:
    """Read a manifest and check every number in it.

    Not collective.

    Args:
        raw: the bytes of the document.
        payload_nbytes: the size of the payload that its extents must lie in.

    Raises:
        CorruptSlot: it is not a manifest; the text says what is wrong first.
    """
    try:
        return from_document(json.loads(raw, parse_constant=_refuse), payload_nbytes)
    except BAD_DOCUMENT as error:
        raise CorruptSlot(f"the manifest is damaged: {error!r}") from None


def from_document(document: Any, payload_nbytes: int) -> Manifest:
    """Read a manifest out of a parsed JSON document as `decode` does; anything wrong is one of `BAD_DOCUMENT`."""
    listed, shared = document["entries"], _shared(document.get("shared"))
    nbytes = 0 if shared is None else shared.nbytes
    entries = tuple(decode_entry(fields, payload_nbytes, nbytes) for fields in listed)
    plain = document["plain"]
    if not isinstance(plain, list):
        raise ValueError("'plain' is not a list")
    for value in plain:
        _check_plain(value)
    _check_tree(document["tree"], len(entries), len(plain), 0)
    return Manifest(entries, document["tree"], plain, shared)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _shared(fields: Any) -> Shared | None:
    if fields is None:
        return None
    by, shares, nbytes = fields
    if not all(type(n) is int and n >= 0 for n in fields) or not 1 <= shares <= 255:
        raise ValueError(f"the shared state is {fields!r}")
    return Shared(by, shares, nbytes)


def decode_entry(fields: Any, payload_nbytes: int, shared_nbytes: int = 0) -> Entry:
    """Make an entry of its fields in a manifest; whatever is wrong with them is one of `BAD_DOCUMENT`."""
    name, kind, dtype, global_shape, offset, shape, start, nbytes = fields
    entry = Entry(name, kind, dtype, tuple(global_shape), tuple(offset), tuple(shape), start, nbytes)
    numbers = (*entry.global_shape, *entry.offset, *entry.shape, start, nbytes)
    if not (isinstance(name, str) and all(type(n) is int and n >= 0 for n in numbers)):
        raise ValueError(f"entry {name!r} has a bad name, shape or extent")
    if not len(entry.global_shape) == len(entry.offset) == len(entry.shape):
        raise ValueError(f"entry {name!r} has shapes of different rank")
    if any(o + s > g for o, s, g in zip(entry.offset, entry.shape, entry.global_shape, strict=True)):
        raise ValueError(f"the shard of entry {name!r} is not inside its tensor")
    if math.prod(entry.shape) * item_nbytes(kind, dtype) != nbytes:
        raise ValueError(f"entry {name!r} has {nbytes} bytes, not those of {entry.shape} x {dtype}")
    room = payload_nbytes if start < payload_nbytes else payload_nbytes + shared_nbytes
    if start + nbytes > room:
        raise ValueError(f"entry {name!r} lies outside the payload")
    return entry


def item_nbytes(kind: Any, dtype: Any) -> int:
    """Bytes of an element; a dtype that a slot cannot hold is one of `BAD_DOCUMENT`."""
    if kind == "tensor":
        return TORCH_ITEM_NBYTES[dtype]
    if kind != "array" or not isinstance(dtype, str) or not _ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError(f"unknown kind {kind!r} or dtype {dtype!r}, which is not allowed")
    parsed = np.dtype(dtype)
    if parsed.hasobject or parsed.names is not None or parsed.str != dtype:
        raise ValueError(f"dtype {dtype!r} is not allowed")
    return parsed.itemsize


def _check_plain(value: Any, depth: int = 0) -> None:
    if isinstance(value, dict) or depth > MAX_DEPTH:
        raise ValueError("a plain leaf is not a plain leaf")
    if isinstance(value, list):
        tag, *rest = value
        lengths = {"i": 1, "f": 1, "b": 1, "k": 1, "c": 2, "n": 2}
        if lengths.get(tag) != len(rest):
            raise ValueError(f"a plain leaf has the unknown tag {tag!r}")
        if tag == "k":
            for part in rest[0]:
                _check_plain(part, depth + 1)
        elif tag == "n":
            item_nbytes("array", rest[0])
        decode_plain(value)


def _check_tree(tree: Any, entries: int, plain: int, depth: int) -> None:
    tag, rest = tree
    if depth > MAX_DEPTH:
        raise ValueError(f"the tree is more than {MAX_DEPTH} levels deep")
    if tag in ("e", "p"):
        if type(rest) is not int or not 0 <= rest < (entries if tag == "e" else plain):
            raise ValueError(f"the tree points at a leaf that is not there: {tag}{rest!r}")
    elif tag == "o":
        _check_tree(rest, entries, plain, depth + 1)
    elif tag in ("l", "t"):
        for sub in rest:
            _check_tree(sub, entries, plain, depth + 1)
    elif tag == "d":
        for key, sub in rest:
            _check_plain(key)
            hash(decode_plain(key))
            _check_tree(sub, entries, plain, depth + 1)
    else:
        raise ValueError(f"the tree has the unknown tag {tag!r}")
