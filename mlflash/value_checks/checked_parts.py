"""A layout → which bytes of a slot are values to be checked, and of which tensor, in stretches of blocks."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..state.layout import Extents
from ..state.leaves import Entry
from .float_formats import FORMATS, FloatFormat

STRETCH_NBYTES = 1 << 20
"""What is looked at at a time, so that numpy's calls take no time: a block or, where these are small, some."""


class Stored(NamedTuple):
    """Bytes of a tensor in a slot or in a share.

    Attributes:
        start: where they begin, bytes from the start of the payload.
    """

    entry: Entry
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Run:
    """Values of one format in a stretch.

    Attributes:
        start, end: where they are, bytes from the start of the payload.
        bounds: where the values of each tensor begin and end, in values from ``start``.
        first: number of the first of these parts; the others follow.
    """

    form: FloatFormat
    start: int
    end: int
    bounds: np.ndarray
    first: int


@dataclasses.dataclass(frozen=True)
class CheckedParts:
    """The parts of tensors in each stretch of a body.

    Attributes:
        stretch: number of blocks in a stretch.
        names: the tensor of each part.
        counts: number of values of each part.
    """

    extents: Extents
    stretch: int
    runs: tuple[tuple[Run, ...], ...]
    names: tuple[str, ...]
    counts: np.ndarray
    formats: tuple[FloatFormat, ...]


def is_skipped(name: str, skip: Sequence[str]) -> bool:
    """Whether the name of a tensor matches one of some shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in skip)


def find(stored: Iterable[Stored], extents: Extents, skip: Sequence[str]) -> CheckedParts:
    """Find what has to be checked: floats with at least one value, except those with some names.

    Args:
        stored: what is in the slot or share; tied tensors may come twice.
    """
    wanted = {
        one.start: one for one in stored if one.nbytes and one.entry.dtype in FORMATS and
        not is_skipped(one.entry.name, skip)
    }  # fmt: skip
    stretch = max(1, STRETCH_NBYTES // extents.block_nbytes)
    parts: list[Stored] = []
    runs = tuple(
        tuple(_runs(its, parts)) for its in _by_stretch([wanted[at] for at in sorted(wanted)], extents, stretch)
    )
    formats = tuple(FORMATS[part.entry.dtype] for part in parts)
    counts = np.array([part.nbytes // form.nbytes for part, form in zip(parts, formats, strict=True)], np.int64)
    return CheckedParts(extents, stretch, runs, tuple(part.entry.name for part in parts), counts, formats)


def _by_stretch(stored: Sequence[Stored], extents: Extents, stretch: int) -> list[list[Stored]]:
    """Cut tensors where stretches end."""
    nbytes = stretch * extents.block_nbytes
    cut: list[list[Stored]] = [[] for _ in range(-(-extents.body_nbytes // nbytes))]
    for one in stored:
        at, end = one.start + extents.manifest_room, one.start + one.nbytes + extents.manifest_room
        while at < end:
            upto = min(end, (at // nbytes + 1) * nbytes)
            cut[at // nbytes].append(Stored(one.entry, at - extents.manifest_room, upto - at))
            at = upto
    return cut


def _runs(stored: Sequence[Stored], parts: list[Stored]) -> Iterator[Run]:
    """Join tensors of one format that follow each other."""
    at = 0
    while at < len(stored):
        form, end = FORMATS[stored[at].entry.dtype], at
        while end < len(stored) and FORMATS[stored[end].entry.dtype] is form:
            end += 1
        its = stored[at:end]
        start, stop = its[0].start, its[-1].start + its[-1].nbytes
        edges = [edge for one in its for edge in (one.start, one.start + one.nbytes)]
        bounds = (np.array(edges, np.int64) - start) // form.nbytes
        yield Run(form, start, stop, bounds, len(parts))
        parts += its
        at = end
