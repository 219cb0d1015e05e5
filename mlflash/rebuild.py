"""Leaves and a tree → state: compared with a live one, filled into it, or built anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import StructureMismatch
from .flatten import is_object
from .plain import decode_plain
from .state import Entry, Tree, array_entry, as_bits, as_bytes, as_shard_like, from_bytes, is_tensor, tensor_entry

Read = Callable[[Entry], "np.ndarray[Any, np.dtype[np.uint8]]"]
"""Gives the bytes of an entry as a 1-d uint8 array that must not be kept."""

_LISTED = 8  # differences shown in an error


def compare(live: Any, tree: Tree, entries: tuple[Entry, ...]) -> list[str]:
    """List how a live state differs in structure from a saved one; empty where it does not.

    Not collective. Objects with ``load_state_dict`` are not looked into: they judge for themselves.
    """
    found: list[str] = []
    _compare(live, tree, entries, "", found)
    return found


def refuse_differences(live: Any, tree: Tree, entries: tuple[Entry, ...]) -> None:
    """Compare as `compare` does.

    Raises:
        StructureMismatch: naming the first differences.
    """
    if found := compare(live, tree, entries):
        shown = "\n    ".join(found[:_LISTED])
        raise StructureMismatch(f"the state given differs from the checkpoint in {len(found)} places:\n    {shown}")


def _compare(live: Any, tree: Tree, entries: tuple[Entry, ...], path: str, found: list[str]) -> None:
    name = path or "(the state itself)"
    tag = tree[0]
    if is_object(live):
        return
    if tag == "o":
        _compare(live, tree[1], entries, path, found)
        return
    prefix = path + "." if path else ""
    if tag == "d" and isinstance(live, dict):
        saved = {decode_plain(key): sub for key, sub in tree[1]}
        for key in live.keys() - saved.keys():
            found.append(f"{prefix}{key}: in the state given, not in the checkpoint")
        for key, sub in saved.items():
            if key in live:
                _compare(live[key], sub, entries, f"{prefix}{key}", found)
            else:
                found.append(f"{prefix}{key}: in the checkpoint, not in the state given")
    elif (tag == "l" and isinstance(live, list)) or (tag == "t" and isinstance(live, tuple)):
        if len(live) != len(tree[1]):
            found.append(f"{name}: {len(tree[1])} items in the checkpoint, {len(live)} in the state given")
        for i, (item, sub) in enumerate(zip(live, tree[1], strict=False)):
            _compare(item, sub, entries, f"{prefix}{i}", found)
    elif tag == "e":
        saved_as, given = _describe_entry(entries[tree[1]]), _describe_live(live, name)
        if saved_as != given:
            found.append(f"{name}: {saved_as} in the checkpoint, {given} in the state given")
    elif tag != "p" or isinstance(live, (dict, list, tuple, np.ndarray)) or is_tensor(live):
        kinds = {"d": "a dict", "l": "a list", "t": "a tuple", "p": "a plain value"}
        found.append(f"{name}: {kinds[tag]} in the checkpoint, {_describe_live(live, name)} in the state given")


def _describe_entry(entry: Entry) -> str:
    whole = "" if entry.global_shape == entry.shape else f" at {list(entry.offset)} of {list(entry.global_shape)}"
    return f"{entry.kind} {entry.dtype} {list(entry.shape)}{whole}"


def _describe_live(value: Any, path: str) -> str:
    if is_tensor(value):
        return _describe_entry(tensor_entry(sys.modules["torch"], value, path)[1])
    if isinstance(value, np.ndarray):
        return _describe_entry(array_entry(value, path)[1])
    return f"a {type(value).__name__}"


def fill(live: Any, tree: Tree, entries: tuple[Entry, ...], plain: list[Any], read: Read) -> None:
    """Put a saved state into a live one, in place.

    Not collective. Tensors and arrays are copied into the live ones, plain leaves replaced, objects get
    copies through ``load_state_dict``. Call :func:`compare` first.

    Raises:
        StructureMismatch: the state itself is a tensor-free leaf or tuple, which cannot be changed in place.
    """
    new = _Fill(tree, entries, plain, read).into(live, tree)
    if new is not live:
        raise StructureMismatch("the state given cannot be changed in place", expected="a dict, list or object",
                                found=type(live).__name__)  # fmt: skip


class _Fill:
    def __init__(self, tree: Tree, entries: tuple[Entry, ...], plain: list[Any], read: Read, copy: bool = True):
        self.copy = copy
        self.entries, self.plain, self.read = entries, plain, read
        self.fresh: dict[tuple[Any, ...], Any] = {}  # tied leaves stay tied

    def into(self, live: Any, tree: Tree) -> Any:
        if is_object(live):
            sharded = "torch.distributed.tensor" in sys.modules
            live.load_state_dict(self.make(tree, live.state_dict() if sharded else None))
            return live
        tag, rest = tree
        if tag == "o":
            return self.into(live, rest)
        if tag == "e":
            copy_into(live, self.entries[rest], self.read(self.entries[rest]))
            return live
        if tag == "p":
            return decode_plain(self.plain[rest])
        if tag == "d":
            for key, sub in rest:
                key = decode_plain(key)
                live[key] = self.into(live[key], sub)
            return live
        if tag == "l":
            for i, sub in enumerate(rest):
                live[i] = self.into(live[i], sub)
            return live
        items = [self.into(item, sub) for item, sub in zip(live, rest, strict=True)]
        if all(new is old for new, old in zip(items, live, strict=True)):
            return live
        return type(live)(*items) if hasattr(live, "_fields") else type(live)(items)

    def make(self, tree: Tree, like: Any = None) -> Any:
        """Build a state anew; what is a DTensor in the one that it is ``like`` becomes such a one again."""
        tag, rest = tree
        if tag == "o":
            return self.make(rest, like.state_dict() if is_object(like) else like)
        if tag == "e":
            entry = self.entries[rest]
            key = (entry.start, entry.kind, entry.dtype, entry.shape) if entry.nbytes else (rest,)
            if key not in self.fresh:
                raw = self.read(entry)
                self.fresh[key] = from_bytes(entry, np.array(raw) if self.copy else raw)
            return as_shard_like(like, self.fresh[key])
        if tag == "p":
            return decode_plain(self.plain[rest])
        if tag == "d":
            there = like if isinstance(like, dict) else {}
            return {(k := decode_plain(key)): self.make(sub, there.get(k)) for key, sub in rest}
        those = like if isinstance(like, (list, tuple)) and len(like) == len(rest) else [None] * len(rest)
        items = [self.make(sub, one) for sub, one in zip(rest, those, strict=True)]
        return items if tag == "l" else tuple(items)


def materialize(tree: Tree, entries: tuple[Entry, ...], plain: list[Any], read: Read, copy: bool = True) -> Any:
    """Build the saved state anew: CPU tensors, arrays, dicts, lists, tuples.

    Not collective. Objects come back as what their ``state_dict`` returned; tied tensors are tied again.

    Args:
        tree, entries, plain: of the manifest.
        read: gives the bytes.
        copy: whether what is handed out is copied, or what ``read`` gives.
    """
    return _Fill(tree, entries, plain, read, copy).make(tree)


def copy_into(live: Any, entry: Entry, raw: np.ndarray) -> None:
    """Copy the bytes of an entry into a live tensor or array, whatever its device and strides."""
    if not entry.nbytes:
        return
    if isinstance(live, np.ndarray):
        np.copyto(live, from_bytes(entry, raw))
        return
    tensor = tensor_entry(sys.modules["torch"], live, entry.name)[0]  # the local shard, without a class of its own
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        np.copyto(as_bytes(tensor), raw)  # one thread, no OpenMP: memcpy speed on a busy machine
    else:
        as_bits(tensor).copy_(as_bits(from_bytes(entry, raw)))
