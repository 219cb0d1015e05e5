"""What ranks have in common: a tree, and for each leaf name, dtype and *class*; and the numbers that tell them apart.

Thousands of ranks differ in which box of each tensor they hold, and thousands of tensors have a dozen distinct boxes.
So a rank is a structure, which many share, and a row of numbers: global shape, offset and shape for each class.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from .dtypes import item_nbytes
from .leaves import Entry, Tree, ties_of
from .manifest import check_tree
from .paths import plain_leaves

MOST = 1 << 60
"""No number of a checkpoint, such as a dimension or a size, is larger, so that sums of some fit in 64 bits."""


@dataclasses.dataclass(frozen=True)
class RankStructure:
    """What ranks have in common.

    Attributes:
        ties: for each leaf the number of the first one with the same memory: usually its own.
        classes: for each leaf the number of its class; leaves of a class have the same box on any one rank.
        dims: for each class the number of dimensions.
        alike: the leaves that all ranks hold alike, in the order in which they were dealt out to files.
        shared: those that the rank's set shares, in that order.
        meshes: for each leaf, see `leaves.Entry`; empty: none is a DTensor.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    ties: tuple[int, ...]
    classes: tuple[int, ...]
    dims: tuple[int, ...]
    tree: Tree
    alike: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    meshes: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[Entry], tree: Tree) -> tuple[RankStructure, np.ndarray]:
        """Describe a rank: its structure, and its row, ``(width,)`` int64."""
        known: dict[Any, int] = {}
        classes = tuple(known.setdefault((e.global_shape, e.offset, e.shape), len(known)) for e in entries)
        meshes = tuple(e.mesh for e in entries)
        made = cls(tuple(e.name for e in entries), tuple(e.kind for e in entries), tuple(e.dtype for e in entries),
                   ties_of(entries), classes, tuple(len(box[0]) for box in known), tree,
                   meshes=meshes if any(mesh is not None for mesh in meshes) else ())  # fmt: skip
        numbers = [n for box in known for part in box for n in part]
        return made, np.array(numbers, dtype="<i8")

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the numbers of each class begin in a row; the last one is the width of a row."""
        return tuple(itertools.accumulate((3 * dims for dims in self.dims), initial=0))

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in reversed([*enumerate(self.names)])}

    @functools.cached_property
    def places(self) -> tuple[dict[int, int], dict[int, int]]:
        """For each leaf in `alike`, and each in `shared`, its position there."""
        alike, shared = ({number: nth for nth, number in enumerate(leaves)} for leaves in (self.alike, self.shared))
        return alike, shared

    @functools.cached_property
    def paths(self) -> dict[str, int]:
        return plain_leaves(self.tree)

    @property
    def document(self) -> list[Any]:
        listed = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return listed if self.meshes else listed[:-1]

    @functools.cached_property
    def key(self) -> bytes:
        """16 bytes that identify it."""
        text = json.dumps(self.document, separators=(",", ":"))
        return xxhash.xxh3_128_digest(text.encode())

    def entries(self, row: np.ndarray) -> tuple[Entry, ...]:
        """The entries of a rank; the start of an entry only tells which entries are tied."""
        boxes = [tuple(map(tuple, row[at : at + 3 * d].reshape(3, d).tolist()))
                 for at, d in zip(self.starts, self.dims, strict=False)]  # fmt: skip
        found: list[Entry] = []
        at = 0
        for n, nth in enumerate(self.classes):
            whole, offset, shape = boxes[nth]
            nbytes = math.prod(shape) * item_nbytes(self.kinds[n], self.dtypes[n])
            start = at if self.ties[n] == n else found[self.ties[n]].start
            found.append(Entry(self.names[n], self.kinds[n], self.dtypes[n], whole, offset, shape, start, nbytes,
                               self.mesh(n)))  # fmt: skip
            at += nbytes
        return tuple(found)

    def mesh(self, number: int) -> str | None:
        return self.meshes[number] if self.meshes else None

    def shape(self, row: np.ndarray, number: int) -> tuple[int, ...]:
        at, dims = self.starts[self.classes[number]], self.dims[self.classes[number]]
        return tuple(row[at + 2 * dims : at + 3 * dims].tolist())

    def nbytes(self, row: np.ndarray, number: int) -> int:
        return math.prod(self.shape(row, number)) * item_nbytes(self.kinds[number], self.dtypes[number])

    def check_rows(self, rows: np.ndarray) -> None:
        """Raise ValueError if rows, ``(ranks, width)``, have a box that is not inside its tensor."""
        for at, d in zip(self.starts, self.dims, strict=False):
            whole, offset, shape = (rows[:, at + n * d : at + (n + 1) * d] for n in range(3))
            wrong = (whole < 0) | (whole > MOST) | (offset < 0) | (shape < 0) | (shape > whole)
            if (wrong | (offset > whole - shape)).any():
                raise ValueError("a shard is not inside its tensor")


def from_document(document: Any, plain: int) -> RankStructure:
    """Read a structure from parsed JSON and check every number; any error is one of `manifest.BAD_DOCUMENT`."""
    names, kinds, dtypes, ties, classes, dims, tree, alike, shared, *more = document
    meshes = tuple(more[0]) if more else ()
    made = RankStructure(tuple(names), tuple(kinds), tuple(dtypes), tuple(ties), tuple(classes), tuple(dims), tree,
                         tuple(alike), tuple(shared), meshes)  # fmt: skip
    leaves = len(made.names)
    if not all(isinstance(name, str) for name in made.names) or not {*map(len, (kinds, dtypes, ties, classes))} <= {
        leaves
    }:
        raise ValueError("leaves without a name, a dtype or a class")
    if len(more) > 1 or (more and len(meshes) != leaves) or not all(isinstance(m, str | None) for m in meshes):
        raise ValueError("a leaf without a mesh")
    for pair in set(zip(made.kinds, made.dtypes, strict=True)):
        item_nbytes(*pair)
    for numbers, end in ((made.classes, len(made.dims)), (made.ties, leaves), (made.dims, 65),
                         (made.alike, leaves), (made.shared, leaves)):  # fmt: skip
        if not all(type(n) is int and 0 <= n < end for n in numbers):
            raise ValueError("a leaf, a class or its dimensions are not there")
    if any(tie > n or made.ties[tie] != tie for n, tie in enumerate(made.ties)):
        raise ValueError("a leaf is tied to a later one")
    dealt = (*made.alike, *made.shared)
    if len(set(dealt)) != len(dealt):
        raise ValueError("a leaf was dealt out twice")
    check_tree(tree, leaves, plain)
    return made
