"""Old shards → new ones: which part of which old rank's tensor makes which part of a new one. Pure.

A tensor is found by its name. Where the old ranks held shards of it, every part of the new shard is cut from one of
them. Where they held it whole and alike, any copy will do. Where they held it whole, each its own (random generators,
positions of data loaders), it does not reshard: a rank gets back what the old rank of its number had, or keeps what
it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import StructureMismatch
from .leaves import Entry, Tree

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape, one number per dimension."""


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor as one old rank holds it.

    Attributes:
        rank: the old rank.
        number: of the entry in its manifest.
        entry: what it says.
        check: a checksum of its bytes where it is whole; None where it is a shard.
    """

    rank: int
    number: int
    entry: Entry
    check: int | None = None


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A part of a new shard.

    Attributes:
        rank: the old rank that has it.
        number: of the entry there.
        source: where it begins in the old shard.
        target: where it begins in the new one.
        shape: of the part.
    """

    rank: int
    number: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    shape: tuple[int, ...]


def fragments(want: Entry, held: Sequence[Held], rank: int, near: Iterable[int] = ()) -> list[Fragment] | None:
    """Find what a new shard is made of.

    Args:
        want: the new shard.
        held: all that old ranks hold of the tensor.
        rank: the new rank.
        near: old ranks whose slots are on this node: they are taken first; else ranks take turns.

    Returns:
        Its parts; None where each old rank had its own and there was none of this rank's number.

    Raises:
        StructureMismatch: it is another tensor, it is not whole, or it does not reshard.
    """
    if is_private(held):
        held = [one for one in held if one.rank == rank]
        if not held:
            return None
        if want.shape != want.global_shape:
            raise StructureMismatch("each rank had its own of this tensor, so that it cannot be cut into shards",
                                    tensor=want.name)  # fmt: skip
    for one in held:
        if (one.entry.kind, one.entry.dtype, one.entry.global_shape) != (want.kind, want.dtype, want.global_shape):
            raise StructureMismatch("a tensor differs from that of the checkpoint", tensor=want.name,
                                    expected=_described(one.entry), found=_described(want))  # fmt: skip
    chosen = _nearest(held, rank, set(near))
    found = []
    for one in chosen:
        if (both := overlap((want.offset, want.shape), (one.entry.offset, one.entry.shape))) is not None:
            source = tuple(a - b for a, b in zip(both[0], one.entry.offset, strict=True))
            target = tuple(a - b for a, b in zip(both[0], want.offset, strict=True))
            found.append(Fragment(one.rank, one.number, source, target, both[1]))
    if not covers(want.shape, [(part.target, part.shape) for part in found]):
        raise StructureMismatch("parts of this tensor are not in the checkpoint", tensor=want.name,
                                expected=f"all of {want.shape} at {want.offset}",
                                found=f"{len(found)} parts of it")  # fmt: skip
    return found


def is_private(held: Sequence[Held]) -> bool:
    """Whether old ranks had a tensor whole, but not alike."""
    distinct = {(one.entry.kind, one.entry.dtype, one.entry.global_shape, one.check) for one in held}
    return len(distinct) > 1 and all(one.check is not None for one in held)


def _described(entry: Entry) -> str:
    return f"{entry.kind} {entry.dtype} {entry.global_shape}"


def _nearest(held: Sequence[Held], rank: int, near: set[int]) -> list[Held]:
    """Of each distinct shard one holder: on this node, else one that depends on the rank, so that all are asked."""
    holders: dict[Box, list[Held]] = {}
    for one in held:
        holders.setdefault((one.entry.offset, one.entry.shape), []).append(one)
    chosen = []
    for those in holders.values():
        here = [one for one in those if one.rank in near]
        chosen.append(here[0] if here else those[rank % len(those)])
    return chosen


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    low = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(h - a for a, h in zip(low, high, strict=True))
    return None if any(n <= 0 for n in shape) else (low, shape)


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether some parts together are all of a shard. Not collective."""
    if math.prod(shape) == 0:
        return True
    if sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape) and _disjoint(boxes):
        return True
    # Shards that overlap otherwise than by being equal: look at each cell of the grid that their edges make.
    edges = [sorted({0, n, *(edge for at, sizes in boxes for edge in (at[d], at[d] + sizes[d]))})
             for d, n in enumerate(shape)]  # fmt: skip
    cells = np.zeros(tuple(len(cuts) - 1 for cuts in edges), dtype=bool)
    for at, sizes in boxes:
        cells[tuple(slice(edges[d].index(first), edges[d].index(first + n))
                    for d, (first, n) in enumerate(zip(at, sizes, strict=True)))] = True  # fmt: skip
    return bool(cells.all())


def _disjoint(boxes: Sequence[Box]) -> bool:
    if len(boxes) > 64:  # let the grid tell
        return False
    return all(overlap(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])


def box(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice[int, int, None], ...]:
    """The index of a box in an array."""
    return tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))


def cut(shape: tuple[int, ...], item_nbytes: int, most_nbytes: int) -> Iterator[Box]:
    """Cut a box into runs of at most so many bytes, along its first dimensions, in C order.

    Example:
        (10, 8) of 4 bytes each, at most 100 → rows 0-2, 3-5, 6-8, 9.
    """
    if not shape or math.prod(shape) * item_nbytes <= most_nbytes:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:]) * item_nbytes
    step = max(1, most_nbytes // row)
    for at in range(0, shape[0], step):
        if row <= most_nbytes:
            yield (at, *(0,) * (len(shape) - 1)), (min(step, shape[0] - at), *shape[1:])
        else:
            for offset, part in cut(shape[1:], item_nbytes, most_nbytes):
                yield (at, *offset), (1, *part)


def plain_leaves(tree: Tree, path: str = "") -> dict[str, int]:
    """The numbers of the plain leaves of a tree, by path."""
    tag: str = tree[0]
    rest: Any = tree[1]
    if tag == "p":
        return {path: rest}
    if tag == "o":
        return plain_leaves(rest, path)
    if tag not in ("d", "l", "t"):
        return {}
    items = [(str(key), sub) for key, sub in rest] if tag == "d" else [(str(i), sub) for i, sub in enumerate(rest)]
    return {at: leaf for key, sub in items for at, leaf in plain_leaves(sub, f"{path}.{key}" if path else key).items()}


def private_plain(held: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The paths of plain leaves that old ranks had, but not alike.

    Args:
        held: of each old rank, its values by path.
    """
    seen: dict[str, str] = {}
    return {path for leaves in held.values() for path, value in leaves.items()
            if seen.setdefault(path, repr(value)) != repr(value)}  # fmt: skip


def merge_plain(live: Sequence[Any], paths: Mapping[str, int], held: Mapping[int, Mapping[str, Any]], rank: int
                ) -> tuple[list[Any], list[str]]:  # fmt: skip
    """Choose the plain leaves of a new rank: what all old ranks have, else what the old rank of its number has.

    Args:
        live: the values that this rank has, by number.
        paths: their numbers, by path.
        held: of each old rank, its values by path.
        rank: the new rank.

    Returns:
        The values to take; and the paths of those that stay as they are, as no old rank has this rank's number.
    """
    values, kept, private = list(live), [], private_plain(held)
    for path, number in paths.items():
        if path not in private:
            values[number] = next(leaves[path] for leaves in held.values() if path in leaves)
        elif path in held.get(rank, {}):
            values[number] = held[rank][path]
        else:
            kept.append(path)
    return values, kept
