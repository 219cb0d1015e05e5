"""Leaves → extents in the slot.

A slot is ``header page | manifest | payload | block table``. Manifest and payload together are the *body*;
the block table holds one checksum per block of the body. See docs/format.md.

    0          4096                      payload_start                 table_start        nbytes
    | header   | manifest, zero padded   | extents, 256-aligned        | 8 bytes a block  |
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from .leaves import Entry, Flat

PAGE_NBYTES = 4096
ALIGN_NBYTES = 256
CHECK_NBYTES = 8  # one XXH3-64
BLOCK_NBYTES = 1 << 20
"""Bytes per checksum, and of a parity block: whole pages, and the same in all processes of a job.

Larger blocks make repairs longer, and smaller ones make tables longer: with 1 MiB a table is 8 millionths of its slot.
"""


def round_up(nbytes: int, unit: int) -> int:
    """Round up to a multiple of ``unit``: ``round_up(257, 256) == 512``."""
    return -(-nbytes // unit) * unit


@dataclasses.dataclass(frozen=True)
class Extents:
    """Where the parts of a slot are, in bytes from the start of its file."""

    manifest_room: int  # bytes set aside for the manifest
    payload_nbytes: int
    block_nbytes: int

    @property
    def payload_start(self) -> int:
        return PAGE_NBYTES + self.manifest_room

    @property
    def body_nbytes(self) -> int:
        return self.manifest_room + self.payload_nbytes

    @property
    def blocks(self) -> int:
        return -(-self.body_nbytes // self.block_nbytes)

    def block(self, number: int) -> slice[int, int, None]:
        return slice(number * self.block_nbytes, min((number + 1) * self.block_nbytes, self.body_nbytes))

    def run(self, first: int, last: int) -> slice[int, int, None]:
        """Blocks ``first`` to ``last - 1``, in bytes from the start of the body."""
        return slice(first * self.block_nbytes, min(last * self.block_nbytes, self.body_nbytes))

    @property
    def table_start(self) -> int:
        return round_up(PAGE_NBYTES + self.body_nbytes, PAGE_NBYTES)

    @property
    def nbytes(self) -> int:
        return self.table_start + round_up(self.blocks * CHECK_NBYTES, PAGE_NBYTES)


class Place(NamedTuple):
    """Where a leaf lies in the payload, in elements of its dtype, row by row."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf goes. ``entries[i]`` belongs to leaf i; tied leaves share an extent."""

    entries: tuple[Entry, ...]
    extents: Extents
    # of state that this rank shares with others: it lies in files of its own, and its entries start behind the payload,
    # as if it followed there
    shared_nbytes: int = 0

    def is_shared(self, entry: Entry) -> bool:
        return entry.nbytes > 0 and entry.start >= self.extents.payload_nbytes

    @functools.cached_property
    def places(self) -> tuple[Place | None, ...]:
        """Where each leaf lies. None: it is empty, or shared, so that another rank may store it."""
        return tuple(None if self.is_shared(entry) or not entry.nbytes else _place(entry) for entry in self.entries)


def _place(entry: Entry) -> Place:
    strides = tuple(itertools.accumulate(entry.shape[:0:-1], operator.mul, initial=1))[::-1]
    return Place(entry.shape, strides[: len(entry.shape)], entry.start // (entry.nbytes // math.prod(entry.shape)))


def plan(flat: Flat, manifest_nbytes: int, shared: Collection[int] = ()) -> Layout:
    """Give each leaf its extent: those of this rank in the order of the state, shared ones by name.

    The manifest gets one and a half times the room that it needs now, so that plain leaves may grow.

    Args:
        shared: numbers of leaves that other ranks hold, too; of tied ones all or none.
    """
    entries, ties = flat.structure.entries, flat.structure.ties
    own = [i for i, tie in enumerate(ties) if tie < 0 and i not in shared]
    common = sorted((i for i in shared if ties[i] < 0), key=lambda i: entries[i].name)
    starts: dict[int, int] = {}
    at = payload_nbytes = 0
    for i in own:
        starts[i] = at
        payload_nbytes = at = round_up(at + entries[i].nbytes, ALIGN_NBYTES)
    for i in common:
        starts[i] = at
        at = round_up(at + entries[i].nbytes, ALIGN_NBYTES)
    placed = tuple(
        msgspec.structs.replace(entry, start=starts[i if tie < 0 else tie])
        for i, (entry, tie) in enumerate(zip(entries, ties, strict=True))
    )
    room = round_up(manifest_nbytes * 3 // 2 + PAGE_NBYTES, PAGE_NBYTES)
    return Layout(placed, Extents(room, payload_nbytes, BLOCK_NBYTES), at - payload_nbytes)
