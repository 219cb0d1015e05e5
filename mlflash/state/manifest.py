"""What a slot holds ↔ bytes.

The manifest is one JSON document: ``{"entries": [...], "tree": [...], "plain": [...], "shared": [...],
"provenance": {...}}``. Everything in it is validated before anything is allocated or touched, so that a damaged or
hostile file ends in `CorruptSlot`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import CorruptSlot, StateError
from . import containers
from .leaves import Entry, Tree, item_nbytes
from .plain_values import MAX_DEPTH, check_plain, decode_plain

BAD_DOCUMENT = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError)
"""What reading a damaged or hostile JSON document can raise."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """State that a slot's rank shares with others, and that is in files of its own."""

    by: int  # the lowest of these ranks
    shares: int  # number of files that it is divided into, on each node
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a slot holds: the entries, and the tree that puts them together again."""

    entries: tuple[Entry, ...]
    tree: Tree
    plain: list[Any]
    shared: Shared | None = None  # where the entries are whose start is behind the payload; None if there are none
    # `versions` of what the trainer had loaded, by name, and what the user has `given`; empty if nothing is known
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def encode_entries(entries: tuple[Entry, ...]) -> bytes:
    """Encode the part that stays the same from save to save."""
    listed = msgspec.to_builtins(entries)
    return _json([fields if fields[-1] is not None else fields[:-1] for fields in listed])


def encode_tree(tree: Tree) -> bytes:
    """Encode the tree, which stays the same as long as the structure does."""
    return _json(tree)


def provenance_of(versions: Mapping[str, str], given: str) -> dict[str, Any]:
    """Return the provenance of a `Manifest`; ``given``: the user's entries, a JSON object, or ""."""
    return {"versions": dict(versions), "given": json.loads(given) if given else {}}


def join(entries: bytes, tree: bytes, plain: list[Any], shared: Shared | None = None,
         provenance: Mapping[str, Any] | None = None) -> bytes:  # fmt: skip
    """Put a manifest together from its encoded parts and the plain leaves of this save."""
    more = b"" if shared is None else b',"shared":%s' % _json(list(dataclasses.astuple(shared)))
    more += b',"provenance":%s' % _json(provenance) if provenance else b""
    return b'{"entries":%s,"tree":%s,"plain":%s%s}' % (entries, tree, _json(plain), more)


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError as error:
        raise StateError(f"the state is nested too deeply for the stack that save() has here: {error}") from None


def read_back(raw: bytes, written: Manifest, payload_nbytes: int) -> None:
    """Read a manifest as a restore would, and compare it, type for type. Raises StateError if anything would differ."""
    try:
        read = decode(raw, payload_nbytes)
        texts = [
            (repr(manifest.tree), repr(manifest.plain)) for manifest in (written, read)
        ]  # as texts, because 1 == True == 1.0
    except (CorruptSlot, RecursionError) as error:
        raise StateError(f"a restore would refuse this state: {error}") from None
    for entry, read_entry in zip(written.entries, read.entries, strict=True):
        if entry != read_entry:
            raise StateError("a restore would read another tensor", tensor=entry.name, expected=entry, found=read_entry)
    for number, (value, read_value) in enumerate(zip(written.plain, read.plain, strict=True)):
        if repr(value) != repr(read_value):
            raise StateError("a restore would read another value", tensor=f"plain leaf {number}",
                             expected=value, found=read_value)  # fmt: skip
    if texts[0] != texts[1] or (read.shared, read.provenance) != (written.shared, written.provenance):
        raise StateError("a restore would read a state of another structure: its keys are not texts of JSON")


def decode(raw: bytes, payload_nbytes: int) -> Manifest:
    """Read a manifest and check every number in it. Raises CorruptSlot, whose text says what is wrong first."""
    try:
        document = json.loads(raw, parse_constant=_refuse)
        listed, shared = document["entries"], _shared(document.get("shared"))
        nbytes = 0 if shared is None else shared.nbytes
        entries = msgspec.convert(listed, tuple[Entry, ...])
        for entry in entries:
            _check_entry(entry, payload_nbytes, nbytes)
        plain = document["plain"]
        if not isinstance(plain, list):
            raise ValueError("'plain' is not a list")
        for value in plain:
            check_plain(value)
        check_tree(document["tree"], len(entries), len(plain))
        return Manifest(entries, document["tree"], plain, shared, _provenance(document.get("provenance", {})))
    except BAD_DOCUMENT as error:
        raise CorruptSlot(f"the manifest is damaged: {error!r}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _shared(fields: Any) -> Shared | None:
    if fields is None:
        return None
    by, shares, nbytes = fields
    if not all(type(n) is int and n >= 0 for n in fields) or not 1 <= shares <= 255:
        raise ValueError(f"the shared state is {fields!r}")
    return Shared(by, shares, nbytes)


def _provenance(document: Any) -> dict[str, Any]:
    if document:
        versions, given = document["versions"], document["given"]
        if not (isinstance(given, dict) and all(isinstance(version, str) for version in versions.values())):
            raise ValueError("the provenance is not valid")
        return {"versions": versions, "given": given}
    return {}


def _check_entry(entry: Entry, payload_nbytes: int, shared_nbytes: int) -> None:
    """Refuse an entry whose numbers do not fit each other, or the slot; the error is one of `BAD_DOCUMENT`."""
    if not len(entry.global_shape) == len(entry.offset) == len(entry.shape):
        raise ValueError(f"entry {entry.name!r} has shapes of different rank")
    is_whole = entry.shape == entry.global_shape and not any(entry.offset)
    if not is_whole and any(o + s > g for o, s, g in zip(entry.offset, entry.shape, entry.global_shape, strict=True)):
        raise ValueError(f"the shard of entry {entry.name!r} is not inside its tensor")
    if math.prod(entry.shape) * item_nbytes(entry.kind, entry.dtype) != entry.nbytes:
        raise ValueError(f"entry {entry.name!r} has {entry.nbytes} bytes, not those of {entry.shape} x {entry.dtype}")
    room = payload_nbytes if entry.start < payload_nbytes else payload_nbytes + shared_nbytes
    if entry.start + entry.nbytes > room:
        raise ValueError(f"entry {entry.name!r} lies outside the payload")


def check_tree(tree: Any, entries: int, plain: int, depth: int = 0) -> None:
    """Refuse a tree with an impossible tag, key or leaf number; the error is one of `BAD_DOCUMENT`."""
    tag, rest, *more = tree
    if depth > MAX_DEPTH:
        raise ValueError(f"the tree is more than {MAX_DEPTH} levels deep")
    if tag in ("e", "p"):
        if type(rest) is not int or not 0 <= rest < (entries if tag == "e" else plain):
            raise ValueError(f"the tree points at a leaf that is not there: {tag}{rest!r}")
    elif tag == "o":
        check_tree(rest, entries, plain, depth + 1)
    elif tag == "k":
        containers.check(*more)
        if rest[0] != ("t" if more[0][0] in ("Size", "namedtuple") else "d"):
            raise ValueError("a container of another class")
        check_tree(rest, entries, plain, depth)
    elif tag in ("l", "t"):
        for sub in rest:
            check_tree(sub, entries, plain, depth + 1)
    elif tag == "d":
        for key, sub in rest:
            if type(key) is not str:
                check_plain(key)
                hash(decode_plain(key))
            check_tree(sub, entries, plain, depth + 1)
    else:
        raise ValueError(f"the tree has the unknown tag {tag!r}")
