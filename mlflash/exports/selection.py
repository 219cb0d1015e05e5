"""Which values of a checkpoint are exported, under which names, and what the user's own function makes of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..state.flatten import flatten
from ..state.leaves import from_bytes, live_bytes
from ..state.paths import plain_leaves
from ..state.plain_values import encode_key
from ..storage.whole_state import Whole

Convert = Callable[[dict[str, Any]], Any]
"""Gets tensors and arrays by name. Returns a state, such as other tensors by name."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """What to export of a checkpoint. It is applied in the order of the attributes.

    Attributes:
        keep: patterns such as ``model.*``. Nothing else is exported, unless there are none.
        drop: patterns of what is not exported.
        rename: regular expressions, each with what replaces it in names, as ``re.sub`` does.
        convert: makes another state of it.
    """

    keep: Sequence[str] = ()
    drop: Sequence[str] = ()
    rename: Sequence[tuple[str, str]] = ()
    convert: Convert | None = None

    def of(self, whole: Whole) -> Whole:
        """Return what is to be exported: a flat dict by name if anything is selected, else the state as it is.

        Collective over the ranks that read the checkpoint if there is a function, which needs all tensors in memory.

        Raises:
            ConfigError: a pattern fits nothing, or two names become one. The error has pattern or name.
            StateError: the function has returned something that is no state.
        """
        if self.keep or self.drop or self.rename:
            names = [*whole.entries, *plain_leaves(whole.tree)]
            kept = set(_matching(names, self.keep) if self.keep else names).difference(_matching(names, self.drop))
            whole = by_name(whole, _renamed([name for name in names if name in kept], self.rename))
        return whole if self.convert is None else _converted(whole, self.convert)


def tensors_by_name(whole: Whole) -> Whole:
    """Return the tensors and arrays of a checkpoint as a flat dict."""
    left_out = (*whole.left_out, *plain_leaves(whole.tree))
    return dataclasses.replace(by_name(whole, {name: name for name in whole.entries}), left_out=left_out)


def by_name(whole: Whole, names: dict[str, str]) -> Whole:
    """Return some values of a checkpoint as a flat dict under new names."""
    places = plain_leaves(whole.tree)
    entries = {new: dataclasses.replace(whole.entries[old], name=new) for old, new in names.items()
               if old in whole.entries}  # fmt: skip
    plain = {new: whole.plain[places[old]] for old, new in names.items() if old not in whole.entries}
    olds = {new: whole.ties.get(old, old) for old, new in names.items() if old in whole.entries}
    first: dict[str, str] = {}
    ties = {new: other for new, old in olds.items() if (other := first.setdefault(old, new)) != new}
    leaves = [[encode_key(name, name), ["e", number]] for number, name in enumerate(entries)]
    leaves += [[encode_key(name, name), ["p", number]] for number, name in enumerate(plain)]

    def read(wanted: Sequence[str]) -> dict[str, np.ndarray]:
        raw = whole.read([olds[name] for name in wanted])
        return {name: raw[olds[name]] for name in wanted}

    return Whole(entries, ties, ["d", leaves], list(plain.values()), read, whole.left_out)


def _matching(names: Sequence[str], patterns: Iterable[str]) -> set[str]:
    matching: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not fitting:
            raise ConfigError("nothing in this checkpoint has a name like this: `mlflash inspect STEP` lists the names",
                              expected=", ".join(names[:3]) + ", ...", found=pattern)  # fmt: skip
        matching |= fitting
    return matching


def _renamed(names: Collection[str], rules: Iterable[tuple[str, str]]) -> dict[str, str]:
    renamed = {name: name for name in names}
    for pattern, new in rules:
        try:
            after = {name: re.sub(pattern, new, now) for name, now in renamed.items()}
            fits = any(re.search(pattern, now) for now in renamed.values())
        except (re.error, IndexError) as error:
            raise ConfigError(f"this cannot rename: {error}", found=f"{pattern} {new}") from None
        if not fits:
            raise ConfigError("nothing to export has a name like this: `mlflash inspect STEP` lists the names",
                              expected=", ".join(list(renamed.values())[:3]) + ", ...", found=pattern)  # fmt: skip
        renamed = after
    first: dict[str, str] = {}
    for name, new in renamed.items():
        if (other := first.setdefault(new, name)) != name:
            raise ConfigError(f"{other} and {name} would get the same name", tensor=new)
    return renamed


def _converted(whole: Whole, convert: Convert) -> Whole:
    raw = whole.read([entry.name for entry in whole.own])
    state = convert({name: from_bytes(entry, raw[whole.ties.get(name, name)]) for name, entry in whole.entries.items()})
    return dataclasses.replace(whole_of(state), left_out=(*whole.left_out, *plain_leaves(whole.tree)))


def whole_of(state: Any) -> Whole:
    """Describe a live state. Raises StateError if this is no state."""
    flat = flatten(state)
    names = [entry.name for entry in flat.structure.entries]
    values = dict(zip(names, flat.values, strict=True))
    ties = {names[number]: names[tie] for number, tie in enumerate(flat.structure.ties) if tie >= 0}
    return Whole(dict(zip(names, flat.structure.entries, strict=True)), ties, flat.structure.tree, flat.plain,
                 lambda wanted: {name: live_bytes(values[name]) for name in wanted})  # fmt: skip
