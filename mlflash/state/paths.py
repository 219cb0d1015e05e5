"""Paths of leaves in a state: short ones with dots, and exact ones where short ones read alike.

``{"a": {"b": x}, "a.b": y}`` has two leaves at ``a.b``, and ``{1: x, "1": y}`` two at ``1``. A path that leaves share
is replaced by one that names each key exactly, whatever the order of the keys is: ``'a'.'b'`` and ``'a.b'``.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

from ..errors import StateError
from .leaves import Tree
from .plain_values import decode_plain

Path = tuple[str, str]
"""A short path and the exact one."""


def plain_leaves(tree: Tree) -> dict[str, int]:
    """The numbers of the plain leaves of a tree, by path."""
    short = [
        (number, path) for tag, number, path in _leaves(tree, "", lambda key: str(decode_plain(key))) if tag == "p"
    ]
    return {path: number for number, path in _unique(tree, "p", short)}


def entry_names(tree: Tree, short: Sequence[str]) -> list[str]:
    """The names of the entries of a tree, given their short paths: these, where they are not shared."""
    return [name for _, name in _unique(tree, "e", [*enumerate(short)])]


def _unique(tree: Tree, tag: str, short: list[tuple[int, str]]) -> list[tuple[int, str]]:
    if len({path for _, path in short}) == len(short):
        return short
    leaves = _leaves(tree, "", lambda key: repr(decode_plain(key)))
    exact = {number: path for kind, number, path in leaves if kind == tag}
    return list(zip((number for number, _ in short), unique([(path, exact[n]) for n, path in short]), strict=True))


def unique(paths: Sequence[Path]) -> list[str]:
    """Choose the short path of each, or the exact one if others have it, too. Raises StateError if two are equal."""
    chosen = [short for short, _ in paths]
    while True:
        count = collections.Counter(chosen)
        improved = [exact if count[name] > 1 else name for name, (_, exact) in zip(chosen, paths, strict=True)]
        if improved == chosen:
            break
        chosen = improved
    if most := [name for name, times in count.items() if times > 1]:
        raise StateError("two leaves have one path: give their keys other names", tensor=most[0])
    return chosen


def _leaves(tree: Tree, path: str, key_text: Callable[[object], str]) -> Iterator[tuple[str, int, str]]:
    """The tag, the number and the path of each leaf."""
    tag, rest = tree[0], tree[1]
    if tag in ("e", "p"):
        yield tag, rest, path
    elif tag in ("o", "k"):
        yield from _leaves(rest, path, key_text)
    elif tag == "d":
        for key, sub in rest:
            yield from _leaves(sub, at(path, key_text(key)), key_text)
    else:
        for number, sub in enumerate(rest):
            yield from _leaves(sub, at(path, str(number)), key_text)


def at(path: str, key: str) -> str:
    """The path of what is under a key."""
    return f"{path}.{key}" if path else key
