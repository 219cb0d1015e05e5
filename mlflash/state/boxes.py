"""Boxes of tensors: where two overlap, whether some cover another, how one is cut. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import add, sub

import numpy as np

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape, one number per dimension."""


def overlap(first: Box, second: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    if len({*map(len, (*first, *second))}) > 1:
        raise ValueError(f"boxes of different dimensions: {first} and {second}")
    low = tuple(map(max, first[0], second[0]))
    shape = tuple(map(sub, map(min, map(add, *first), map(add, *second)), low))
    return None if min(shape, default=1) <= 0 else (low, shape)


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether some parts together cover a shard."""
    if math.prod(shape) == 0:
        return True
    if sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape) and _disjoint(boxes):
        return True
    # Some shards overlap and are not equal: check each cell of the grid that their edges make.
    edges = [sorted({0, n, *(edge for at, sizes in boxes for edge in (at[d], at[d] + sizes[d]))})
             for d, n in enumerate(shape)]  # fmt: skip
    cells = np.zeros(tuple(len(cuts) - 1 for cuts in edges), dtype=bool)
    for at, sizes in boxes:
        cells[tuple(slice(bisect_left(edges[d], first), bisect_left(edges[d], first + n))
                    for d, (first, n) in enumerate(zip(at, sizes, strict=True)))] = True  # fmt: skip
    return bool(cells.all())


def _disjoint(boxes: Sequence[Box]) -> bool:
    if len(boxes) > 16:  # the grid is faster than a comparison of pairs
        return False
    return all(overlap(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])


def box(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice[int, int, None], ...]:
    """The index of a box in an array."""
    if len(offset) != len(shape):
        raise ValueError(f"no box: offset {offset} and shape {shape}")
    return tuple(map(slice, offset, map(add, offset, shape)))


def cut(shape: tuple[int, ...], item_nbytes: int, most_nbytes: int) -> Iterator[Box]:
    """Cut a box into runs of so many bytes, in C order: (10, 8) of 4 bytes, at most 100 → rows 0-2, 3-5, 6-8, 9."""
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
