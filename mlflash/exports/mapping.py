"""Rules that rename, drop, split, join and transpose tensors on their way out.

Each line is a rule. The rules apply in order, each to the result of the rules before it::

    keep      model.**
    rename    model.{rest...} -> {rest...}
    split     layers.{i}.attn.qkv.weight -> layers.{i}.attn.{q,k,v}.weight   sizes=64,16,16
    join      layers.{i}.mlp.gate.weight, layers.{i}.mlp.up.weight -> layers.{i}.mlp.gate_up.weight
    transpose h.{i}.attn.c_attn.weight
    stack     layers.{i}.experts.{n}.weight -> layers.{i}.experts.weight

In a pattern ``{i}`` stands for one or more characters without a dot, and ``{rest...}`` for any characters. ``*`` and
``**`` are the same without a name. A list in braces stands for several names: ``x.{q,k}`` is ``x.q, x.k``.
`docs/export.md` has the details.

Rules first make a plan: all shapes are known before a byte is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from ..state.leaves import Entry
from .formulas import Formula, Joined, Part, Saved, Transposed, stacked, taken
from .outputs import Output, item_nbytes
from .rules import Rule, read_rules

__all__ = ["plan", "read_rules"]


@dataclasses.dataclass(frozen=True)
class _Item:
    """A tensor between two rules."""

    formula: Formula
    kind: str
    dtype: str


_Made = dict[str, _Item]


def plan(
    entries: Mapping[str, Entry], rules: Sequence[Rule] = (), ties: Mapping[str, str] | None = None
) -> list[Output]:
    """Plan how rules change the tensors of a checkpoint.

    Not collective. This reads nothing.

    Args:
        entries: the tensors of the checkpoint, each whole.
        rules: the rules, in order. Without rules all tensors stay as they are.
        ties: name → earlier name that has the same memory.

    Returns:
        The tensors to write, in the order of the tensors that they are made from.

    Raises:
        ConfigError: a rule matches nothing, makes a name twice, or does not fit a tensor. The error names file, line
            and tensor.
    """
    ties = ties or {}
    named = {
        name: _Item(Saved(ties.get(name, name), entry.shape), entry.kind, entry.dtype)
        for name, entry in entries.items()
    }
    for rule in rules:
        named = _apply(rule, named)
    outputs = []
    first: dict[_Item, str] = {}
    for name, item in named.items():
        tie = first.setdefault(item, name)
        shape, sources = item.formula.shape, item.formula.sources
        nbytes = math.prod(shape) * max(item_nbytes(entries[source]) for source in sources)
        entry = Entry(name, item.kind, item.dtype, shape, (0,) * len(shape), shape, 0, nbytes)
        outputs.append(Output(entry, item.formula, None if tie == name else tie))
    return outputs


def _apply(rule: Rule, named: _Made) -> _Made:
    """Apply a rule to all tensors. The result of a tensor takes its place in the order."""
    changed = _many_to_one(rule, named) if rule.verb in ("join", "stack") else _one_by_one(rule, named)
    made: _Made = {}
    for name, item in named.items():
        for new, its in changed.get(name, {name: item}).items():
            if new in made:
                raise rule.error("another tensor already has this name", new)
            made[new] = its
    return made


def _one_by_one(rule: Rule, named: _Made) -> dict[str, _Made]:
    changed: dict[str, _Made] = {}
    for pattern in rule.patterns:
        matched = {name: captures for name in named if (captures := pattern.match(name)) is not None}
        if not matched:
            raise rule.error(f"{pattern} matches no tensor; tensors are, for example: {', '.join(list(named)[:3])}")
        for name, captures in matched.items():
            if rule.verb == "keep":
                changed[name] = {name: named[name]}
            elif name not in changed:
                changed[name] = _changed(rule, name, named[name], captures)
    if rule.verb == "keep":
        return {name: changed.get(name, {}) for name in named}
    return changed


def _changed(rule: Rule, name: str, item: _Item, captures: Mapping[str, str]) -> _Made:
    if rule.verb == "drop":
        return {}
    if rule.verb == "transpose":
        return {name: dataclasses.replace(item, formula=_transposed(rule, name, item.formula))}
    if rule.verb == "rename":
        return {rule.targets[0].fill(captures): item}
    if rule.verb == "unstack":
        target, dim = rule.targets[0], _dim(rule, name, item.formula)
        (index,) = set(target.captures) - captures.keys()
        formulas = {
            target.fill({**captures, index: str(at)}): taken(item.formula, dim, at)
            for at in range(item.formula.shape[dim])
        }
    else:
        parts = _parts(rule, name, item.formula)
        formulas = dict(zip((target.fill(captures) for target in rule.targets), parts, strict=True))
        if len(formulas) < len(parts):
            raise rule.error("two parts get the same name", name)
    return {new: dataclasses.replace(item, formula=formula) for new, formula in formulas.items()}


def _dim(rule: Rule, name: str, formula: Formula, more: int = 0) -> int:
    """Return the dimension of a rule, counted from the front. It may exceed the tensor's by ``more`` dimensions."""
    (dim,) = rule.options.get("dim", (0,))
    count = len(formula.shape) + more
    if not -count <= dim < count:
        raise rule.error(f"the tensor has no dimension {dim}", name, found=formula.shape)
    return dim % count


def _transposed(rule: Rule, name: str, formula: Formula) -> Formula:
    count = len(formula.shape)
    dims = rule.options.get("dims", (1, 0))
    if sorted(dims) != list(range(count)):
        raise rule.error("dims= must name each dimension once; you may leave it out only for a matrix", name,
                         expected=f"an order of the {count} dimensions of {formula.shape}", found=dims)  # fmt: skip
    return Transposed(formula, dims)


def _parts(rule: Rule, name: str, formula: Formula) -> list[Formula]:
    """Cut a tensor into parts. With groups, cut each group."""
    dim, count = _dim(rule, name, formula), len(rule.targets)
    length, (groups,) = formula.shape[dim], rule.options.get("groups", (1,))
    group = length // groups
    sizes = rule.options.get("sizes", (group // count,) * count)
    if sum(sizes) * groups != length:
        equal = f"{count} equal parts" if "sizes" not in rule.options else " + ".join(map(str, sizes))
        raise rule.error(f"dimension {dim} cannot be cut like this", name, expected=f"{equal}, in {groups} groups"
                         if groups > 1 else equal, found=f"{length}, in shape {formula.shape}")  # fmt: skip
    parts: list[Formula] = []
    start = 0
    for size in sizes:
        cut = tuple(Part(formula, dim, at * group + start, at * group + start + size) for at in range(groups))
        parts.append(cut[0] if groups == 1 else Joined(cut, dim))
        start += size
    return parts


def _many_to_one(rule: Rule, named: _Made) -> dict[str, _Made]:
    changed: dict[str, _Made] = {}
    used: set[str] = set()
    place = {name: number for number, name in enumerate(named)}
    for target, members in _members(rule, named).items():
        items = [named[name] for name in members]
        for name, item in zip(members, items, strict=True):
            _refuse_unlike(rule, members[0], items[0], name, item)
            if name in used:
                raise rule.error("this tensor is used twice", name)
            used.add(name)
            changed[name] = {}
        formula = _joined(rule, members, [item.formula for item in items])
        changed[min(members, key=place.__getitem__)] = {target: dataclasses.replace(items[0], formula=formula)}
    return changed


def _members(rule: Rule, named: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors to join, in order, by the name of the result."""
    target = rule.targets[0]
    free_places = [key for key in rule.patterns[0].captures if key not in target.captures]
    found: dict[str, dict[tuple[str, ...], dict[str, str]]] = {}
    for name in named:
        for pattern in rule.patterns:
            if (captures := pattern.match(name)) is not None:
                free = tuple(captures[key] for key in free_places)
                found.setdefault(target.fill(captures), {})[free] = captures
    if not found:
        raise rule.error(f"{rule.patterns[0]} matches no tensor")
    there = set(named)
    members = {}
    for new, captured in found.items():
        runs = sorted(captured, key=_natural)
        names = [pattern.fill(captured[free]) for free in runs for pattern in rule.patterns]
        if missing := [name for name in names if name not in there]:
            raise rule.error(f"this tensor is missing, and {new!r} needs it", missing[0])
        if len(free_places) == 1 and all(number.isdecimal() for (number,) in runs):
            numbers = {int(number) for (number,) in runs}
            if (gap := next((n for n in range(max(numbers)) if n not in numbers), None)) is not None:
                raise rule.error(f"the tensors for {new!r} have numbers up to {max(numbers)}, but {gap} is missing")
        members[new] = names
    return members


def _natural(words: Iterable[str]) -> list[tuple[int, str]]:
    """Sorts 2 before 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def _refuse_unlike(rule: Rule, first: str, one: _Item, name: str, other: _Item) -> None:
    """Refuse tensors that cannot be joined."""
    a, b = one.formula.shape, other.formula.shape
    if rule.verb == "join":
        dim, same_dim = _dim(rule, first, one.formula), len(a) == len(b)
        a, b = a[:dim] + a[dim + 1 :], b[:dim] + b[dim + 1 :] if same_dim else b
    if (one.kind, one.dtype, a) != (other.kind, other.dtype, b):
        raise rule.error(f"cannot be joined with {first!r}", name, expected=f"{one.dtype} {one.formula.shape}",
                         found=f"{other.dtype} {other.formula.shape}")  # fmt: skip


def _joined(rule: Rule, names: list[str], formulas: list[Formula]) -> Formula:
    if rule.verb == "stack":
        return stacked(tuple(formulas), _dim(rule, names[0], formulas[0], more=1))
    dim, (groups,) = _dim(rule, names[0], formulas[0]), rule.options.get("groups", (1,))
    for name, formula in zip(names, formulas, strict=True):
        if formula.shape[dim] % groups:
            raise rule.error(f"dimension {dim} does not have {groups} equal groups", name, found=formula.shape)
    steps = [formula.shape[dim] // groups for formula in formulas]
    if groups == 1:
        return Joined(tuple(formulas), dim)
    return Joined(tuple(Part(formula, dim, at * step, (at + 1) * step) for at in range(groups)
                        for formula, step in zip(formulas, steps, strict=True)), dim)  # fmt: skip
