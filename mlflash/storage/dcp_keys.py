"""Structure of a state → the keys that PyTorch DCP gives its leaves.

DCP looks into dicts, and into lists that hold tensors or dicts; each tensor has a key of its own. Everything else is an
object: one pickle, whatever is in it. So are arrays, and tuples even where tensors are in them. An empty dict is lost.

Source: torch.distributed.checkpoint._nested_dict, since PyTorch 2.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ..errors import StateError
from ..state.leaves import Entry, Tree, inside
from ..state.paths import unique
from ..state.plain_values import decode_plain

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Keys:
    """How a state is arranged in a DCP checkpoint.

    Attributes:
        tensors: key → number of the entry.
        objects: key → the part of the state that is pickled as one.
        paths: key → where it is in the nested state.
    """

    tensors: dict[str, int] = dataclasses.field(default_factory=dict)
    objects: dict[str, Tree] = dataclasses.field(default_factory=dict)
    paths: dict[str, Path] = dataclasses.field(default_factory=dict)


def keys_of(tree: Tree, entries: Sequence[Entry]) -> Keys:
    """Give each leaf the key that ``dcp.save`` would give it; where that refuses two alike, their exact paths.

    See `paths` for exact ones.

    Raises:
        StateError: the state is not a dict.
    """
    if inside(tree)[0] != "d":
        raise StateError("a DCP checkpoint holds a dict: save the state as {'state': ...}")
    found = list(_visit(tree, (), entries))
    names = unique([(".".join(map(str, path)), ".".join(exact)) for path, exact, _ in found])
    keys = Keys()
    for key, (path, _, part) in zip(names, found, strict=True):
        keys.paths[key] = path
        if _is_tensor(node := inside(part), entries):
            keys.tensors[key] = node[1]
        else:
            keys.objects[key] = part
    return keys


def _visit(tree: Tree, path: Path, entries: Sequence[Entry], exact: tuple[str, ...] = ()
           ) -> Iterator[tuple[Path, tuple[str, ...], Tree]]:  # fmt: skip
    """Each part of the state that gets a key, and where it is."""
    tag, rest = inside(tree)
    if tag == "d":
        for code, sub in rest:
            key = decode_plain(code)
            yield from _visit(sub, (*path, str(key)), entries, (*exact, repr(key)))
    elif tag == "l" and _is_open(inside(tree), entries):
        for number, sub in enumerate(rest):
            yield from _visit(sub, (*path, number), entries, (*exact, str(number)))
    else:
        yield path, exact, tree


def _is_tensor(tree: Tree, entries: Sequence[Entry]) -> bool:
    return tree[0] == "e" and entries[tree[1]].kind == "tensor"


def _is_open(tree: Tree, entries: Sequence[Entry]) -> bool:
    """Whether DCP looks into a list."""
    items = [inside(item) for item in tree[1]]
    return any(item[0] == "d" or _is_tensor(item, entries) or (item[0] == "l" and _is_open(item, entries))
               for item in items)  # fmt: skip
