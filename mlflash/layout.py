"""Leaves → extents in the slot.

A slot is ``header page | manifest | payload | block table``. Manifest and payload together are the *body*;
the block table holds one checksum per block of the body. See docs/format.md.

    0          4096                      payload_start                 table_start        nbytes
    | header   | manifest, zero padded   | extents, 256-aligned        | 8 bytes a block  |
"""

from __future__ import annotations

import dataclasses

from .state import Entry, Flat

PAGE_NBYTES = 4096
ALIGN_NBYTES = 256
CHECK_NBYTES = 8  # one XXH3-64


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
        """Where a block is in the body; the last one may be short."""
        return slice(number * self.block_nbytes, min((number + 1) * self.block_nbytes, self.body_nbytes))

    @property
    def table_start(self) -> int:
        return round_up(PAGE_NBYTES + self.body_nbytes, PAGE_NBYTES)

    @property
    def nbytes(self) -> int:
        return self.table_start + round_up(self.blocks * CHECK_NBYTES, PAGE_NBYTES)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf goes. ``entries[i]`` belongs to leaf i; tied leaves share an extent."""

    entries: tuple[Entry, ...]
    extents: Extents


def fingerprint(flat: Flat) -> tuple[object, ...]:
    """Tell whether two states have the same layout: equal fingerprints, equal extents."""
    return tuple((leaf.entry, leaf.tie) for leaf in flat.leaves)


def plan(flat: Flat, manifest_nbytes: int, block_nbytes: int) -> Layout:
    """Give each leaf its extent, in the order of the state.

    Not collective. The manifest gets half as much room again as it needs now, so that plain leaves may grow.

    Args:
        flat: the state taken apart.
        manifest_nbytes: bytes of the encoded manifest, now.
        block_nbytes: bytes per checksum.
    """
    entries: list[Entry] = []
    at = 0
    for leaf in flat.leaves:
        if leaf.tie >= 0:
            entries.append(dataclasses.replace(leaf.entry, start=entries[leaf.tie].start))
            continue
        entries.append(dataclasses.replace(leaf.entry, start=at))
        at = round_up(at + leaf.entry.nbytes, ALIGN_NBYTES)
    room = round_up(manifest_nbytes * 3 // 2 + PAGE_NBYTES, PAGE_NBYTES)
    return Layout(tuple(entries), Extents(room, at, block_nbytes))
