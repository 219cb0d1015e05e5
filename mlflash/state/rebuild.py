"""Leaves and a tree → state: compared with a live one, filled into it, or built anew."""

from __future__ import annotations

import collections
import copy
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import StructureMismatch
from . import containers, copy_kernel, paths, torch_objects, wrapped_tensors
from .flatten import Unbegun, has_not_begun, is_object
from .leaves import (
    Described,
    Entry,
    Replica,
    Tree,
    array_entry,
    as_bits,
    as_bytes,
    as_shard_like,
    class_name,
    from_bytes,
    is_as_stored,
    is_tensor,
    tensor_entry,
)
from .plain_values import decode_plain

Read = Callable[[Entry], "np.ndarray[Any, np.dtype[np.uint8]]"]
"""Gives the bytes of an entry as a 1-d uint8 array that must not be kept."""

_LISTED = 8  # differences shown in an error
_TOGETHER_NBYTES = 64 << 20  # of leaves that are copied together: their bytes may have been put together for this
_CONTAINERS = {"d": "a dict", "l": "a list", "t": "a tuple"}


def compare(live: Any, tree: Tree, entries: tuple[Entry, ...]) -> list[str]:
    """List how a live state differs from a saved one; of objects only what torch would certainly refuse to load."""
    return Comparison(live, tree, entries).differences


class Comparison:
    """Finds how a live state differs from a saved one; of objects only what torch would certainly refuse to load."""

    def __init__(self, live: Any, tree: Tree, entries: tuple[Entry, ...], described: Described | None = None):
        self._entries, self._described = entries, described or Described()
        self.differences: list[str] = []
        self.has_objects = False
        self._compare(live, tree, "")

    def refuse(self) -> None:
        """Raise StructureMismatch, which names the first differences, if there are any."""
        if self.differences:
            shown = "\n    ".join(self.differences[:_LISTED])
            places = f"{len(self.differences)} place{'s' * (len(self.differences) > 1)}"
            raise StructureMismatch(f"the state given differs from the checkpoint in {places}:\n    {shown}")

    def _compare(self, live: Any, tree: Tree, path: str, code: containers.Code | None = None) -> None:
        name = path or "(the state itself)"
        tag = tree[0]
        if is_object(live):
            self.has_objects = True
            self.differences += torch_objects.refusals(live, tree, self._entries, path)
            return
        if _is_wrapped(tree) or (is_tensor(live) and wrapped_tensors.found_in(live, name) is not None):
            self._compare_wrapped(live, tree, path)
            return
        if tag in ("o", "k"):
            self._compare(live, tree[1], path, tree[2] if tag == "k" else None)
            return
        prefix = path + "." if path else ""
        if isinstance(live, (dict, list, tuple)) and tag in ("d", "l", "t") and not containers.fits(live, code):
            self._differs(live, name, _CONTAINERS[tag] if code is None else " ".join(code))
        if tag == "d" and isinstance(live, dict):
            saved = {decode_plain(key): sub for key, sub in tree[1]}
            for key in live.keys() - saved.keys():
                self.differences.append(f"{prefix}{key}: in the state given, not in the checkpoint")
            for key, sub in saved.items():
                if key in live:
                    self._compare(live[key], sub, f"{prefix}{key}")
                else:
                    self.differences.append(f"{prefix}{key}: in the checkpoint, not in the state given")
        elif (tag == "l" and isinstance(live, list)) or (tag == "t" and isinstance(live, tuple)):
            if len(live) != len(tree[1]):
                self.differences.append(f"{name}: {len(tree[1])} items in the checkpoint, {len(live)} in the state "
                                        "given")  # fmt: skip
            for i, (item, sub) in enumerate(zip(live, tree[1], strict=False)):
                self._compare(item, sub, f"{prefix}{i}")
        elif tag == "e":
            self._compare_leaf(live, self._entries[tree[1]], name)
        elif tag != "p" or isinstance(live, (dict, list, tuple, np.ndarray)) or is_tensor(live):
            self._differs(live, name, _CONTAINERS.get(tag, "a plain value"))

    def _compare_leaf(self, live: Any, saved: Entry, name: str) -> None:
        if isinstance(live, np.ndarray) or is_tensor(live):
            given = self._described.of(live, name)[1]
            if _kind_and_place(given) == _kind_and_place(saved):
                return
        self._differs(live, name, _describe_entry(saved))

    def _differs(self, live: Any, name: str, saved: str) -> None:
        self.differences.append(f"{name}: {saved} in the checkpoint, {_describe_live(live, name)} in the state given")

    def _compare_wrapped(self, live: Any, tree: Tree, path: str) -> None:
        """Compare tensors of which at least one wraps others."""
        name = path or "(the state itself)"
        part = wrapped_tensors.found_in(live, name) if is_tensor(live) else None
        if part is None or not _is_wrapped(tree):
            is_leaf = tree[0] == "e"
            self._differs(live, name, tree[2][1] if _is_wrapped(tree) else "one that wraps none" if is_leaf else
                          "no tensor")  # fmt: skip
            return
        tensor, shard = part
        inner, attributes = wrapped_tensors.inner_of(tensor), wrapped_tensors.attributes_of(tensor, name, shard)
        saved = {decode_plain(key): sub for key, sub in tree[1][1]}
        if (wrapped_tensors.code_of(tensor), attributes, inner.keys()) != (tree[2], tree[3], saved.keys()):
            given = f"{_describe_live(live, name)} {[*attributes.values()]}"
            self.differences.append(
                f"{name}: {tree[2][1]} {[*tree[3].values()]} in the checkpoint, {given} in the state given"
            )
            return
        for key, sub in saved.items():
            self._compare(inner[key], sub, f"{path}.{key}" if path else key)


def _is_wrapped(tree: Tree) -> bool:
    return bool(tree[0] == "k" and tree[2][0] == wrapped_tensors.WRAPPED)


def _kind_and_place(entry: Entry) -> tuple[Any, ...]:
    return entry.kind, entry.dtype, entry.shape, entry.global_shape, entry.offset


def _describe_entry(entry: Entry) -> str:
    place = "" if entry.global_shape == entry.shape else f" at {list(entry.offset)} of {list(entry.global_shape)}"
    return f"{entry.kind} {entry.dtype} {list(entry.shape)}{place}"


def _describe_live(value: Any, path: str) -> str:
    if is_tensor(value):
        if (part := wrapped_tensors.found_in(value, path)) is not None:
            return class_name(part[0])
        return _describe_entry(tensor_entry(sys.modules["torch"], value, path)[1])
    if isinstance(value, np.ndarray):
        return _describe_entry(array_entry(value, path)[1])
    return f"a {type(value).__name__}"


class Filling:
    """Puts a saved state into a live one, in place, and restores the previous values if that fails.

    Call :func:`compare` first.

    Args:
        live: tensors and arrays are overwritten, plain leaves replaced, objects get copies through ``load_state_dict``.
    """

    def __init__(self, live: Any, tree: Tree, entries: tuple[Entry, ...], plain: list[Any], read: Read,
                 described: Described | None = None):  # fmt: skip
        self._live, self._tree, self._entries, self._plain = live, tree, entries, plain
        self._described = described or Described()
        self._copies: list[tuple[Any, np.ndarray]] = []  # contiguous leaves of the host, and the bytes that they get
        self._copied_nbytes = 0  # of those
        self._read, self._made = read, _Made(entries, plain, read)
        objects: list[tuple[paths.Path, tuple[Any, Tree]]] = []
        self._find(live, tree, ("", ""), objects)
        names = paths.unique([path for path, _ in objects])
        # those in the state that load by themselves, and what was saved of each, by path
        self.objects = dict(zip(names, (loadable for _, loadable in objects), strict=True))
        self._kept: dict[str, Any] = {}
        self._replaced: list[tuple[Any, Any, Any]] = []  # container, key or index, former value
        self._attributes: list[tuple[Any, dict[str, Any]]] = []  # state dict, former attributes
        self._alike: dict[Any, Any] | None = None  # live DTensors, by mesh, global shape, offset and shape
        self._for_good = False  # whether something without a copy has changed

    def nbytes_of(self, path: str) -> int:
        nbytes_at = {
            entry.start: entry.nbytes for entry in (self._entries[n] for n in _entry_numbers(self.objects[path][1]))
        }
        return sum(nbytes_at.values())

    def keep(self, names: Collection[str]) -> None:
        """Copy the present state of objects, so that it can be put back; some may not give it."""
        for path in names:
            try:
                live = self.objects[path][0]
                self._kept[path] = Unbegun.of(live) if has_not_begun(live) else _copied(live.state_dict())
            except Exception:  # some objects cannot give their state before they have loaded one
                continue

    def load(self, names: Collection[str]) -> None:
        """Load some of the objects. Not collective, but what objects do may be."""
        for path in names:
            live, tree = self.objects[path]
            self._for_good |= path not in self._kept
            like = self._dtensors(live, tree) if "torch.distributed.tensor" in sys.modules else {}
            made = self._made
            if torch_objects.copies_what_it_loads(live, tree):
                made = _Made(self._entries, self._plain, self._read, copy=False)
            own = torch_objects.own_tensors(live, tree, self._entries)
            torch_objects.load(live, made.make(tree, like, own), path)

    def _dtensors(self, live: Any, tree: Tree) -> dict[int, Any]:
        """Find a live DTensor for each one that was saved of an object, by number: of its own, or one that is alike.

        For a replica that is like none, one on its mesh is enough.

        Raises:
            StructureMismatch: there is none.
        """
        wanted = {n for n in _entry_numbers(tree) if self._entries[n].mesh is not None}
        like_of = torch_objects.patterns(live, tree, self._entries)
        like_of = {number: like for number, like in like_of.items() if number in wanted}
        wrapped = torch_objects.wrapped_patterns(live, tree, self._entries)
        for number in wanted - like_of.keys():
            entry = self._entries[number]
            if self._alike is None:
                self._alike = torch_objects.dtensors_in([self._live, *(item for item, _ in self.objects.values())])
            like = self._alike.get((entry.mesh, entry.global_shape, entry.offset, entry.shape))
            if like is not None:
                like_of[number] = like
            elif entry.shape != entry.global_shape:
                raise StructureMismatch("this tensor was saved in shards, and no DTensor of the state given is like "
                                        "it: let the object make it before the restore", tensor=entry.name)  # fmt: skip
            elif (near := self._near(live, entry.mesh)) is not None:
                like_of[number] = Replica(near)
        return like_of | {~number: like for number, like in wrapped.items()}

    def _near(self, live: Any, mesh: str | None) -> Any:
        """Find a DTensor on a mesh: one of an object, or any of the state; None if there is none."""
        for dtensors in (torch_objects.dtensors_in([live]), self._alike or {}):
            for (other_mesh, *_), dtensor in dtensors.items():
                if other_mesh == mesh:
                    return dtensor
        return None

    def fill_leaves(self) -> None:
        """Fill tensors, arrays and plain leaves. Raises StructureMismatch if the state itself cannot be changed."""
        if self.objects:  # what they have loaded may have given tensors other memory
            self._described.forget()
        filled = self._into(self._live, self._tree)
        self._copy_together()
        if filled is not self._live:
            raise StructureMismatch("the state given cannot be changed in place", expected="a dict, list or object",
                                    found=type(self._live).__name__)  # fmt: skip

    def put_back(self) -> bool:
        """Put back what was there before; return whether all of it is there again. Not collective, but objects may be.

        What was kept is put back whether it was loaded on this rank or not, because other ranks may have come further.
        """
        for container, key, before in reversed(self._replaced):
            container[key] = before
        for container, attributes in reversed(self._attributes):
            vars(container).clear()
            vars(container).update(attributes)
        for path, kept in self._kept.items():
            try:
                if isinstance(kept, Unbegun):
                    kept.put_back(self.objects[path][0])
                else:
                    torch_objects.load(self.objects[path][0], kept, path)
            except Exception:  # load_state_dict() may raise anything
                self._for_good = True
        return not self._for_good

    def _find(self, live: Any, tree: Tree, path: paths.Path, objects: list[tuple[paths.Path, tuple[Any, Tree]]]
              ) -> None:  # fmt: skip
        if is_object(live):
            objects.append((path, (live, tree)))
            return
        tag, rest = tree[0], tree[1]
        if tag in ("o", "k"):
            self._find(live, rest, path, objects)
        elif tag == "d" and isinstance(live, dict):
            for key, sub in rest:
                key = decode_plain(key)
                self._find(live.get(key), sub, (paths.at(path[0], str(key)), paths.at(path[1], repr(key))), objects)
        elif tag in ("l", "t") and isinstance(live, (list, tuple)):
            for i, (item, sub) in enumerate(zip(live, rest, strict=False)):
                self._find(item, sub, (paths.at(path[0], str(i)), paths.at(path[1], str(i))), objects)

    def _fill_leaf(self, live: Any, entry: Entry) -> None:
        if not entry.nbytes:
            return
        local, raw = self._described.of(live, entry.name)[0], self._read(entry)
        is_writable = not isinstance(local, np.ndarray) or local.flags.writeable
        if is_as_stored(local) and is_writable and raw.flags.c_contiguous:
            self._copies.append((local, raw))
            self._copied_nbytes += raw.nbytes
            if self._copied_nbytes >= _TOGETHER_NBYTES:
                self._copy_together()
        else:
            copy_into(live, entry, raw)

    def _copy_together(self) -> None:
        leaves, sources = [leaf for leaf, _ in self._copies], [raw for _, raw in self._copies]
        copy_kernel.copy(copy_kernel.addresses(leaves), copy_kernel.addresses(sources), [raw.nbytes for raw in sources])
        self._copies, self._copied_nbytes = [], 0

    def _into(self, live: Any, tree: Tree) -> Any:
        if is_object(live):
            return live
        tag, rest = tree[0], tree[1]
        if tag == "o":
            return self._into(live, rest)
        if _is_wrapped(tree):
            part = wrapped_tensors.found_in(live, "")
            assert part is not None
            inner = wrapped_tensors.inner_of(part[0])
            for key, sub in rest[1]:
                self._into(inner[decode_plain(key)], sub)
            return live
        if tag == "k":
            filled = self._into(live, rest)
            if isinstance(live, tuple):
                same = filled is live and containers.code_of(live, "") == tree[2]
                return live if same else containers.as_class(filled, *tree[2:])
            if isinstance(live, collections.OrderedDict):
                self._attributes.append((live, dict(vars(live))))
                containers.set_attributes(live, tree[3])
            return live
        if tag == "e":
            self._for_good = True
            self._fill_leaf(live, self._entries[rest])
            return live
        if tag == "p":
            return decode_plain(self._plain[rest])
        if tag in ("d", "l"):
            for key, sub in rest if tag == "d" else enumerate(rest):
                key = decode_plain(key)
                before = live[key]
                if (new := self._into(before, sub)) is not before:
                    self._replaced.append((live, key, before))
                    live[key] = new
            return live
        items = [self._into(item, sub) for item, sub in zip(live, rest, strict=True)]
        if all(new is old for new, old in zip(items, live, strict=True)):
            return live
        return tuple(items)


def _entry_numbers(tree: Tree) -> Iterator[int]:
    tag, rest = tree[0], tree[1]
    if tag == "e":
        yield rest
    elif tag in ("o", "k"):
        yield from _entry_numbers(rest)
    elif tag in ("d", "l", "t"):
        for sub in rest:
            yield from _entry_numbers(sub[1] if tag == "d" else sub)


def _copied(value: Any) -> Any:
    if is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, sub in value.items():
            copied[key] = _copied(sub)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(sub) for sub in value)
    return _copied(value.state_dict()) if is_object(value) else copy.deepcopy(value)


class _Made:
    """Leaves and nodes of a checkpoint that are built anew; tied leaves stay tied."""

    def __init__(self, entries: tuple[Entry, ...], plain: list[Any], read: Read, copy: bool = True):
        self._entries, self._plain, self._read, self._copy = entries, plain, read, copy
        self._fresh: dict[tuple[Any, ...], Any] = {}

    def make(self, tree: Tree, like: Mapping[int, Any], own: Mapping[int, Any] = types.MappingProxyType({})) -> Any:
        """Build a state anew.

        Args:
            like: DTensors, by number of the entry: an entry becomes a DTensor like that; by ``~number`` of the first
                entry of a tensor that wraps others: that tensor does.
            own: tensors that get the bytes of an entry, and are then used for it.
        """
        tag, rest = tree[0], tree[1]
        if tag == "o":
            return self.make(rest, like, own)
        if tag == "k":
            made = containers.as_class(self.make(rest, like, own), *tree[2:])
            return as_shard_like(like.get(~next(_entry_numbers(tree))), made) if _is_wrapped(tree) else made
        if tag == "e" and rest in own:
            copy_into(own[rest], self._entries[rest], self._read(self._entries[rest]))
            return own[rest]
        if tag == "e":
            entry = self._entries[rest]
            key = (entry.start, entry.kind, entry.dtype, entry.shape) if entry.nbytes else (rest,)
            if key not in self._fresh:
                raw = self._read(entry)
                self._fresh[key] = from_bytes(entry, np.array(raw) if self._copy else raw)
            return as_shard_like(like.get(rest), self._fresh[key])
        if tag == "p":
            return decode_plain(self._plain[rest])
        if tag == "d":
            return {decode_plain(key): self.make(sub, like, own) for key, sub in rest}
        items = [self.make(sub, like, own) for sub in rest]
        return items if tag == "l" else tuple(items)


def materialize(tree: Tree, entries: tuple[Entry, ...], plain: list[Any], read: Read, copy: bool = True) -> Any:
    """Build the saved state anew, on the CPU: objects as what ``state_dict`` returned, and tied tensors tied again."""
    return _Made(entries, plain, read, copy).make(tree, {})


def copy_into(live: Any, entry: Entry, raw: np.ndarray) -> None:
    """Copy the bytes of an entry into a live tensor or array, whatever its device and strides."""
    if not entry.nbytes:
        return
    if isinstance(live, np.ndarray):
        np.copyto(live, from_bytes(entry, raw))
        return
    tensor = tensor_entry(sys.modules["torch"], live, entry.name)[0]  # the local shard, without a class of its own
    if is_as_stored(tensor):
        np.copyto(as_bytes(tensor), raw)  # on one thread, without OpenMP: as fast as memcpy on a busy machine
    else:
        as_bits(tensor).copy_(as_bits(from_bytes(entry, raw)))
