"""What all ranks of a checkpoint hold, in little memory: each structure once, and for each rank a row of numbers.

With 10,000 ranks of 3,000 leaves that is 6 MB; an object for each leaf of each rank took 23 GiB. For each class of
leaves it is computed once which parts of which ranks' tensors make up a new shard. What a rank holds is put together
when it is asked for.

A tensor is found by its name. If the old ranks held shards of it, every part of the new shard is cut from one of them.
If they held it whole and alike, any copy will do. If they held it whole, each its own (random generators, positions of
data loaders), it does not reshard: a rank gets back what the old rank with its number had, or keeps what it has.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..errors import StructureMismatch
from .boxes import Box, covers, overlap
from .leaves import Entry, Tree, item_nbytes, names_on_several_meshes, ties_of
from .manifest import check_tree
from .paths import plain_leaves

Spot = tuple[int, int]
"""A group, and the number of a leaf in its structure."""

_Key = tuple[tuple[int, int], ...]  # for each spot of a tensor: a group, and a class of its structure
_Part = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # old rank, spot, source, target, shape


@dataclasses.dataclass(frozen=True)
class OldRank:
    """What one old rank holds."""

    # entries, tree: of its manifest; the start of an entry only tells which entries are tied
    entries: tuple[Entry, ...]
    tree: Tree
    plain: dict[str, Any]  # its plain leaves by path, encoded
    content: Mapping[str, bytes]  # the bytes of some entries, by name, if these were asked for


@dataclasses.dataclass
class Group:
    """The ranks of one structure."""

    structure: RankStructure
    ranks: np.ndarray  # ascending, (n,) int64
    rows: np.ndarray  # a row for each rank, (n, width) int64
    plain: list[Any]  # the plain leaves of the first rank


@dataclasses.dataclass(frozen=True)
class _Column:
    """All that ranks hold of the tensors of a class, by rank."""

    at: np.ndarray  # position of each rank among all, (n,)
    spots: np.ndarray  # for each, the number of its spot, (n,)
    boxes: np.ndarray  # offset and shape, (n, 2, dims) int64
    wholes: tuple[tuple[int, ...], ...]  # the distinct global shapes
    sharded: bool


class Fragment(NamedTuple):
    """A part of a new shard."""

    rank: int  # the old rank that has it
    number: int  # number of the entry there
    source: tuple[int, ...]  # where it begins in the old shard
    target: tuple[int, ...]  # where it begins in the new one
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """What makes up a new shard; iterating yields a `Fragment` for each part."""

    template: Sequence[_Part]
    numbers: Sequence[int]

    @property
    def ranks(self) -> np.ndarray:
        return np.fromiter((rank for rank, *_ in self.template), dtype=np.int64, count=len(self))

    def __len__(self) -> int:
        return len(self.template)

    def __getitem__(self, nth: int) -> Fragment:
        rank, spot, source, target, shape = self.template[nth]
        return Fragment(rank, self.numbers[spot], source, target, shape)

    def __iter__(self) -> Iterator[Fragment]:
        return map(self.__getitem__, range(len(self)))


class OldRanks(Mapping[int, OldRank]):
    """The ranks of a checkpoint, ascending; what one of them holds is made anew each time that it is asked for.

    Args:
        groups: the ranks of each structure, ordered by their lowest rank.
        differ: names of tensors that ranks hold whole, but not with the same bytes on all; None: they were not
            compared.
        plain_differ: paths of plain leaves that are not the same on all ranks.
        contents: for some ranks the bytes of some entries, by name.
        near: ranks whose slots are on this node: they are taken first; otherwise new ranks take turns. None: all are
            near.
    """

    def __init__(self, groups: Sequence[Group], differ: frozenset[str] | None, plain_differ: frozenset[str],
                 plain_of: Callable[[int], list[Any]], contents: Mapping[int, Mapping[str, bytes]],
                 near: Collection[int] | None = None):  # fmt: skip
        self.groups, self._differ, self.plain_differ = groups, differ, plain_differ
        self._plain_of, self.contents = plain_of, dict(contents)
        ranks = np.concatenate([group.ranks for group in groups])
        order = np.argsort(ranks)
        self.ranks = ranks[order]  # all of them, ascending, (n,) int64
        self._group_of = np.repeat(np.arange(len(groups)), [len(group.ranks) for group in groups])[order]
        self._near = np.isin(self.ranks, self.ranks if near is None else list(near))
        self.spots: dict[str, list[Spot]] = {}
        for nth, group in enumerate(groups):
            for number, name in enumerate(group.structure.names):
                self.spots.setdefault(name, []).append((nth, number))
        has_meshes = any(group.structure.meshes for group in groups)
        listed = ((name, self._mesh(spot)) for name, spots in self.spots.items() for spot in spots)
        # names under which ranks held different tensors, each on a mesh of its own
        self.apart = names_on_several_meshes(listed) if has_meshes else set()
        self._columns: dict[_Key, _Column] = {}
        self._templates: dict[Any, tuple[list[_Part], bool]] = {}
        self._asked_last: tuple[int, tuple[RankStructure, np.ndarray]] | None = None

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks.tolist())

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def row(self, rank: int) -> tuple[RankStructure, np.ndarray]:
        if self._asked_last is None or self._asked_last[0] != rank:
            group, at = self._place(rank)
            self._asked_last = rank, (group.structure, group.rows[at])
        return self._asked_last[1]

    def __getitem__(self, rank: int) -> OldRank:
        if rank not in self:
            raise KeyError(rank)
        structure, row = self.row(rank)
        values = self._plain_of(rank)
        plain = {path: values[number] for path, number in structure.paths.items()}
        return OldRank(structure.entries(row), structure.tree, plain, self.contents.get(rank, {}))

    def of_structures(self) -> Iterator[OldRank]:
        """What the lowest rank of each structure holds."""
        for group in self.groups:
            yield self[int(group.ranks[0])]

    def group_of(self, rank: int) -> int:
        return int(self._group_of[self.ranks.searchsorted(rank)])

    def _place(self, rank: int) -> tuple[Group, int]:
        group = self.groups[self.group_of(rank)]
        return group, int(group.ranks.searchsorted(rank))

    def _mesh(self, spot: Spot) -> str | None:
        return self.groups[spot[0]].structure.mesh(spot[1])

    def spots_of(self, entry: Entry) -> list[Spot]:
        """Where a tensor is, by name and mesh. Raises StructureMismatch if ranks held it on other meshes only."""
        spots = self.spots.get(entry.name, [])
        if entry.name not in self.apart:
            return spots
        on_mesh = [spot for spot in spots if self._mesh(spot) == entry.mesh]
        if not on_mesh:
            meshes = sorted("no mesh" if mesh is None else mesh or "all ranks" for mesh in {*map(self._mesh, spots)})
            raise StructureMismatch("ranks held different tensors under this name, each on a mesh of its own, and the "
                                    "state given has it on another", tensor=entry.name, expected="; ".join(meshes),
                                    found="no mesh" if entry.mesh is None else entry.mesh or "all ranks")  # fmt: skip
        return on_mesh

    def like(self, rank: int, live: Collection[Entry]) -> int:
        """The old rank whose structure a new rank has: its own number, if that held its tensors on the same meshes."""
        first = rank if rank in self else int(self.ranks[rank % len(self)])
        if not self.apart:
            return first
        mesh_of = {entry.name: entry.mesh for entry in live if entry.name in self.apart}
        usual = self.group_of(first)
        for nth in sorted(range(len(self.groups)), key=lambda nth: nth != usual):
            structure = self.groups[nth].structure
            if all(
                structure.mesh(structure.numbers[name]) == mesh
                for name, mesh in mesh_of.items()
                if name in structure.numbers
            ):
                return first if nth == usual else int(self.groups[nth].ranks[0])
        return first

    def is_private(self, spots: Sequence[Spot]) -> bool:
        if self._differ is None or self.is_sharded(spots):
            return False
        leaves = [(self.groups[group].structure, number) for group, number in spots]
        kinds = {(structure.kinds[number], structure.dtypes[number]) for structure, number in leaves}
        differs = any(structure.names[number] in self._differ for structure, number in leaves)
        return differs or len(kinds) > 1 or len(self._wholes(spots)) > 1

    def elements(self, spots: Iterable[Spot]) -> int:
        """How many elements of a tensor all ranks have together; what several have counts for each."""
        return sum(int(column.boxes[:, 1].prod(axis=1).sum()) for column in self._by_dims(spots))

    def is_sharded(self, spots: Iterable[Spot]) -> bool:
        return any(column.sharded for column in self._by_dims(spots))

    @property
    def compared(self) -> bool:
        """Whether it is known which of the tensors that ranks hold whole are alike."""
        return self._differ is not None

    def parts(self, want: Entry, rank: int, spots: Sequence[Spot] | None = None, only: int | None = None
              ) -> Parts | None:  # fmt: skip
        """Find what makes up a new shard.

        Args:
            spots: where the tensor is; None: look it up by its name.

        Returns:
            Its parts; None if each old rank had its own and there was no rank of this number.

        Raises:
            StructureMismatch: it is another tensor, it is not whole, or it does not reshard.
        """
        spots = self.spots_of(want) if spots is None else spots
        if self.is_private(spots) and only is None:
            spots = [spot for spot in spots if rank in self.groups[spot[0]].ranks]
            if not spots:
                return None
            if want.shape != want.global_shape:
                raise StructureMismatch("each rank had its own version of this tensor, so it cannot be cut into shards",
                                        tensor=want.name)  # fmt: skip
            only = rank
        if only is not None:
            spots = [spot for spot in spots if only in self.groups[spot[0]].ranks]
        self._refuse_others(want, spots, only)
        key = self._key(spots)
        what = (key, want.global_shape, want.offset, want.shape, rank, only)
        if what not in self._templates:
            self._templates[what] = self._template(key, want, rank, only)
        template, is_covered = self._templates[what]
        if not is_covered:
            raise StructureMismatch("parts of this tensor are not in the checkpoint", tensor=want.name,
                                    expected=f"all of {want.shape} at {want.offset}",
                                    found=f"{len(template)} parts of it")  # fmt: skip
        return Parts(template, [number for _, number in spots])

    def _refuse_others(self, want: Entry, spots: Sequence[Spot], only: int | None) -> None:
        leaves = [(self.groups[group].structure, number) for group, number in spots]
        kinds = dict.fromkeys((structure.kinds[number], structure.dtypes[number]) for structure, number in leaves)
        for kind, dtype in kinds:
            for whole in self._wholes(spots, only):
                if (kind, dtype, whole) != (want.kind, want.dtype, want.global_shape):
                    raise StructureMismatch("a tensor differs from that of the checkpoint", tensor=want.name,
                                            expected=f"{kind} {dtype} {whole}",
                                            found=f"{want.kind} {want.dtype} {want.global_shape}")  # fmt: skip

    def _wholes(self, spots: Iterable[Spot], only: int | None = None) -> list[tuple[int, ...]]:
        if only is None:
            return [*dict.fromkeys(whole for column in self._by_dims(spots) for whole in column.wholes)]
        group, at = self._place(only)
        starts, classes = group.structure.starts, [group.structure.classes[number] for _, number in spots]
        return [tuple(group.rows[at, starts[n] : starts[n] + group.structure.dims[n]].tolist()) for n in classes]

    def _template(self, key: _Key, want: Entry, rank: int, only: int | None) -> tuple[list[_Part], bool]:
        """The parts of a new shard, and whether they cover it: the same for all leaves of a class."""
        if not key:
            return [], covers(want.shape, [])
        column = self._column(key)
        holding = np.arange(len(column.at)) if only is None else np.flatnonzero(self.ranks[column.at] == only)
        offset, shape = column.boxes[holding, 0], column.boxes[holding, 1]
        first, sizes = (np.array(numbers, dtype=np.int64) for numbers in (want.offset, want.shape))
        low, high = np.maximum(offset, first), np.minimum(offset + shape, first + sizes)
        hits = holding[(high > low).all(axis=1)]
        parts: list[_Part] = []
        for alike in _alike(column.boxes[hits]):
            holders = hits[alike]
            close = holders[self._near[column.at[holders]]]
            chosen = int(close[0] if len(close) else holders[rank % len(holders)])
            box: Box = tuple(column.boxes[chosen, 0].tolist()), tuple(column.boxes[chosen, 1].tolist())
            both = overlap((want.offset, want.shape), box)
            assert both is not None
            source = tuple(a - b for a, b in zip(both[0], box[0], strict=True))
            target = tuple(a - b for a, b in zip(both[0], want.offset, strict=True))
            parts.append((int(self.ranks[column.at[chosen]]), int(column.spots[chosen]), source, target, both[1]))
        return parts, covers(want.shape, [(target, part) for *_, target, part in parts])

    def _key(self, spots: Iterable[Spot]) -> _Key:
        return tuple((group, self.groups[group].structure.classes[number]) for group, number in spots)

    def _by_dims(self, spots: Iterable[Spot]) -> list[_Column]:
        """What ranks hold of a tensor, which may have other dimensions on each."""
        sorts: dict[int, list[Spot]] = {}
        for group, number in spots:
            structure = self.groups[group].structure
            sorts.setdefault(structure.dims[structure.classes[number]], []).append((group, number))
        return [self._column(self._key(of_dims)) for of_dims in sorts.values()]

    def _column(self, key: _Key) -> _Column:
        """What ranks hold of some classes, all of the same number of dimensions."""
        if key not in self._columns:
            ranks, spots, numbers = [], [], []
            for nth, (group, number) in enumerate(key):
                holders = self.groups[group]
                first, dims = holders.structure.starts[number], holders.structure.dims[number]
                ranks.append(holders.ranks)
                spots.append(np.full(len(holders.ranks), nth))
                numbers.append(holders.rows[:, first : first + 3 * dims].reshape(len(holders.ranks), 3, dims))
            order = np.argsort(np.concatenate(ranks), kind="stable")
            boxes = np.concatenate(numbers)[order]
            at = np.searchsorted(self.ranks, np.concatenate(ranks)[order])
            wholes = tuple(tuple(boxes[alike[0], 0].tolist()) for alike in _alike(boxes[:, 0]))
            sharded = bool((boxes[:, 0] != boxes[:, 2]).any())
            self._columns[key] = _Column(at, np.concatenate(spots)[order], boxes[:, 1:], wholes, sharded)
        return self._columns[key]

    def merge_plain(self, live: Sequence[Any], paths: Mapping[str, int], rank: int) -> list[Any]:
        """Choose the plain leaves of a new rank: what all old ranks have, or that of its number, or ``live`` ones."""
        values, held = list(live), self[rank].plain if rank in self else {}
        for path, number in paths.items():
            if path not in self.plain_differ:
                group = next(group for group in self.groups if path in group.structure.paths)
                values[number] = group.plain[group.structure.paths[path]]
            elif path in held:
                values[number] = held[path]
        return values


def _alike(rows: np.ndarray) -> list[np.ndarray]:
    """The positions of equal rows, ascending, in the order in which they first occur."""
    if not rows.size:
        return [np.arange(len(rows))] if len(rows) else []
    flat = rows.reshape(len(rows), -1)
    _, first, inverse, counts = np.unique(flat, axis=0, return_index=True, return_inverse=True, return_counts=True)
    places = np.split(np.argsort(inverse.reshape(-1), kind="stable"), np.cumsum(counts)[:-1])
    return [places[n] for n in np.argsort(first)]


# Thousands of ranks differ in which box of each tensor they hold, and thousands of tensors have a dozen distinct boxes.


MOST = 1 << 60
"""No number of a checkpoint, such as a dimension or a size, is larger, so that sums of some fit in 64 bits."""


@dataclasses.dataclass(frozen=True)
class RankStructure:
    """What ranks have in common."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    ties: tuple[int, ...]  # for each leaf the number of the first one with the same memory: usually its own
    # for each leaf the number of its class; leaves of a class have the same box on any one rank
    classes: tuple[int, ...]
    dims: tuple[int, ...]  # for each class the number of dimensions
    tree: Tree
    # the leaves that all ranks hold alike, in the order in which they were dealt out to files
    alike: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()  # those that the rank's set shares, in that order
    meshes: tuple[str | None, ...] = ()  # for each leaf, see `leaves.Entry`; empty: none is a DTensor

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
        entries: list[Entry] = []
        at = 0
        for n, nth in enumerate(self.classes):
            whole, offset, shape = boxes[nth]
            nbytes = math.prod(shape) * item_nbytes(self.kinds[n], self.dtypes[n])
            start = at if self.ties[n] == n else entries[self.ties[n]].start
            entries.append(Entry(self.names[n], self.kinds[n], self.dtypes[n], whole, offset, shape, start, nbytes,
                               self.mesh(n)))  # fmt: skip
            at += nbytes
        return tuple(entries)

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


def structure_from_document(document: Any, plain: int) -> RankStructure:
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
