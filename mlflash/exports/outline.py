"""The contents of an open checkpoint with every tensor whole, from a saved state or from a DCP plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..draining.file_index import first_names
from ..errors import CorruptSlot
from ..restoring.open_in_memory import OpenCheckpoint
from ..state.dtypes import item_nbytes
from ..state.leaves import Entry, Tree, ties_of
from ..state.meshes import apart
from ..state.old_ranks import Spot
from ..state.paths import plain_leaves
from ..state.plain_values import encode_key
from ..storage import dcp_plans
from ..storage.dcp_plans import Path


@dataclasses.dataclass
class Outline:
    """A state without the bytes of its tensors.

    Attributes:
        entries: each tensor or array by its name, whole.
        spots: where each tensor is in the structures of the old ranks.
        ties: name → the earlier name that has the same memory.
        tree, plain: structure and plain leaves, encoded. Their numbers are places in ``entries`` and ``plain``.
        left_out: names of objects that exist only as a pickle.
    """

    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    spots: dict[str, list[Spot]] = dataclasses.field(default_factory=dict)
    ties: dict[str, str] = dataclasses.field(default_factory=dict)
    tree: Tree = dataclasses.field(default_factory=lambda: ["d", []])
    plain: list[Any] = dataclasses.field(default_factory=list)
    left_out: tuple[str, ...] = ()


def outline(opened: OpenCheckpoint) -> Outline:
    """Return the contents of a checkpoint that was opened with ``told=dcp_plans.TOLD``. Not collective."""
    is_planned = dcp_plans.is_planned(opened.olds.groups[0].structure.tree)
    return _of_plan(opened) if is_planned else _of_state(opened)


def _of_state(opened: OpenCheckpoint) -> Outline:
    """Outline a saved state. If ranks had different values, take those of the lowest rank."""
    found = Outline()
    numbers: dict[str, int] = {}
    name_of = apart((entry.name, entry.mesh) for old in opened.olds.of_structures() for entry in old.entries)
    for nth, old in enumerate(opened.olds.of_structures()):
        names = [name_of(entry.name, entry.mesh) for entry in old.entries]
        pairs = enumerate(zip(names, old.entries, strict=True))
        marks = {n: name.removeprefix(entry.name) for n, (name, entry) in pairs if name != entry.name}
        for name, entry, first in zip(names, old.entries, ties_of(old.entries), strict=True):
            if name not in numbers:
                numbers[name] = len(numbers)
                found.entries[name] = dataclasses.replace(_whole(entry), name=name)
                found.spots[name] = opened.olds.spots_of(entry)
                if names[first] != name:
                    found.ties[name] = names[first]
        values = {number: old.plain[path] for path, number in plain_leaves(old.tree).items()}
        tree = _marked(_numbered(old.tree, values, [numbers[name] for name in names], found.plain), {
            numbers[names[n]]: mark for n, mark in marks.items()})  # fmt: skip
        found.tree = tree if nth == 0 else _merged(found.tree, tree)
    return found


def _of_plan(opened: OpenCheckpoint) -> Outline:
    """Outline the nested state of a DCP plan, as far as the planner kept the place of each part."""
    found = Outline()
    paths: dict[str, Path] = {}
    subs: dict[str, Tree] = {}
    left_out: list[str] = []
    for rank, old in opened.olds.items():
        group = opened.olds.group_of(rank)
        index, numbers = dcp_plans.Index.decode(old.told[dcp_plans.INDEX]), dcp_plans.keys_of(old.tree)
        paths |= index.paths()
        names, firsts = dcp_plans.names_of(old.tree, old.entries), first_names(old.entries)
        for key in index.tensors:
            if key not in numbers:
                raise CorruptSlot("a tensor of the plan is not in the slot", tensor=key[0], step=opened.step, rank=rank)
            entry = old.entries[numbers[key]]
            found.entries.setdefault(key[0], dataclasses.replace(_whole(entry), name=key[0]))
            first = names.get(firsts[numbers[key]], key[0])
            if first != key[0] and first in found.entries:
                found.ties.setdefault(key[0], first)
            if (spot := (group, numbers[key])) not in (spots := found.spots.setdefault(key[0], [])):
                spots.append(spot)
        readable = dcp_plans.values(index, old.told[dcp_plans.BYTES])
        left_out += [name for name in index.parts if name not in readable]
        for name, (tree, plain) in readable.items():
            subs.setdefault(name, _moved(tree, len(found.plain)))
            found.plain += plain
    subs |= {name: ["e", number] for number, name in enumerate(found.entries)}
    found.tree = _nested({paths.get(name, (name,)): subs[name] for name in (*paths, *subs) if name in subs})
    found.left_out = tuple(sorted(left_out))
    return found


def _whole(entry: Entry) -> Entry:
    nbytes = item_nbytes(entry.kind, entry.dtype) * math.prod(entry.global_shape)
    zero = (0,) * len(entry.global_shape)
    return dataclasses.replace(entry, offset=zero, shape=entry.global_shape, start=0, nbytes=nbytes)


def _numbered(tree: Tree, old: Mapping[int, Any], numbers: list[int], plain: list[Any]) -> Tree:
    """Renumber a rank's tree for the whole state, and add its plain leaves, ``old``, to ``plain``."""
    tag, rest = tree[0], tree[1]
    if tag == "e":
        return ["e", numbers[rest]]
    if tag == "p":
        plain.append(old[rest])
        return ["p", len(plain) - 1]
    if tag in ("o", "k"):
        return [tag, _numbered(rest, old, numbers, plain), *tree[2:]]
    if tag == "d":
        return ["d", [[key, _numbered(sub, old, numbers, plain)] for key, sub in rest]]
    return [tag, [_numbered(sub, old, numbers, plain) for sub in rest]]


def _marked(tree: Tree, marks: Mapping[int, str]) -> Tree:
    """Add marks to the keys of some tensors, by number, so that trees of several ranks have a place for each."""
    tag, rest = tree[0], tree[1]
    if not marks or tag in ("e", "p"):
        return tree
    if tag in ("o", "k"):
        return [tag, _marked(rest, marks), *tree[2:]]
    if tag == "d":
        return ["d", [[f"{key}{marks[sub[1]]}" if sub[0] == "e" and sub[1] in marks and type(key) is str else key,
                       _marked(sub, marks)] for key, sub in rest]]  # fmt: skip
    return [tag, [_marked(sub, marks) for sub in rest]]


def _moved(tree: Tree, by: int) -> Tree:
    """Shift the numbers of the plain leaves in a tree."""
    tag, rest = tree[0], tree[1]
    if tag == "p":
        return ["p", rest + by]
    if tag in ("o", "k"):
        return [tag, _moved(rest, by), *tree[2:]]
    if tag == "d":
        return ["d", [[key, _moved(sub, by)] for key, sub in rest]]
    return [tag, [_moved(sub, by) for sub in rest]]


def _nested(parts: dict[Path, Tree]) -> Tree:
    """Build a nested state. Names are keys of dicts, and numbers are places in lists."""
    inside: dict[str | int, dict[Path, Tree]] = {}
    for path, tree in parts.items():
        if not path:
            return tree
        inside.setdefault(path[0], {})[path[1:]] = tree
    if inside and all(type(key) is int for key in inside):
        return ["l", [_nested(inside[key]) for key in sorted(inside)]]
    return ["d", [[encode_key(key, ""), _nested(subs)] for key, subs in inside.items()]]


def _merged(one: Tree, other: Tree) -> Tree:
    """Merge the trees of two ranks. If both have a key, the first counts (pipeline stages have different layers)."""
    if one[0] == other[0] == "k" and one[3] and other[3]:  # of the modules of both
        return ["k", _merged(one[1], other[1]), one[2], _merged(one[3], other[3])]
    if other[0] in ("o", "k"):
        return _merged(one, other[1])
    if one[0] in ("o", "k"):
        return [one[0], _merged(one[1], other), *one[2:]]
    if one[0] != "d" or other[0] != "d":
        return one
    known = {repr(key): nth for nth, (key, _) in enumerate(one[1])}
    items = [list(item) for item in one[1]]
    for key, sub in other[1]:
        if repr(key) in known:
            items[known[repr(key)]][1] = _merged(items[known[repr(key)]][1], sub)
        else:
            items.append([key, sub])
    return ["d", items]
