"""What several ranks hold alike → which rank writes which part of it. Pure.

Each of them could write all of it. It is dealt out, so that each writes about as much and no byte is written twice. A
tensor is cut along its first dimension only, so that a part is one run of its bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import xxhash

from ..state.leaves import Entry

_WHOLE_NBYTES = 1 << 20  # smaller tensors are not divided

Part = tuple[int, int, int]
"""Number of a tensor, first row, row after the last; of one that is not cut, 0 and the size of its first dimension."""


def digest(entry: Entry, content: int) -> bytes:
    """16 bytes for a tensor with its name, dtype, shape and content (its XXH3-128)."""
    said = f"{entry.name}\0{entry.kind}\0{entry.dtype}\0{entry.global_shape}\0{content:x}"
    return xxhash.xxh3_128_digest(said.encode())


def deal(entries: Sequence[Entry], ranks: int, nth: int) -> Iterator[Part]:
    """Deal tensors out among some ranks; return the parts of the nth of them.

    Example:
        Tensors of 10, 10 and 20 MiB for 2 ranks: the first gets the first two, the second the third.
    """
    total = sum(entry.nbytes for entry in entries)
    low, high = total * nth // ranks, total * (nth + 1) // ranks
    at = 0
    for number, entry in enumerate(entries):
        first, at = at, at + entry.nbytes
        rows = entry.shape[0] if entry.shape else 1
        if entry.nbytes < _WHOLE_NBYTES or rows < 2:
            if (low <= first < high) if entry.nbytes else nth == 0:
                yield number, 0, rows
            continue
        row = entry.nbytes // rows
        begin, end = (min(rows, max(0, -(-(bound - first) // row))) for bound in (low, high))
        if begin < end:
            yield number, begin, end


def part_of(entry: Entry, begin: int, end: int) -> Entry:
    """Rows of a tensor, as an entry; ``start`` is where they begin in it."""
    if not entry.shape or (begin, end) == (0, entry.shape[0]):
        return _moved(entry, entry.offset, entry.shape, 0)
    offset = (entry.offset[0] + begin, *entry.offset[1:])
    shape = (end - begin, *entry.shape[1:])
    return _moved(entry, offset, shape, begin * (entry.nbytes // entry.shape[0]))


def _moved(entry: Entry, offset: tuple[int, ...], shape: tuple[int, ...], start: int) -> Entry:
    item = entry.nbytes // max(1, math.prod(entry.shape))
    return dataclasses.replace(entry, offset=offset, shape=shape, start=start, nbytes=item * math.prod(shape))
