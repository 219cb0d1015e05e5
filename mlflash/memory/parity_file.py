"""What a parity file holds: the heads of its group's slots, then parity blocks. It has the form of a slot.

The *head* of a slot is its header and its block table. Every member of a group keeps the heads of all. When a slot is
lost, they say how large it was, and what each of its blocks must be once it is rebuilt. At the place where a slot has
its manifest, a parity file has the heads, padded to whole blocks, so that one bad block is one lost parity block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import CorruptSlot
from ..state.layout import CHECK_NBYTES, Extents
from .slot import Slot, table_check
from .slot_header import HEADER_NBYTES, Header, unpack

Head = tuple[Header, np.ndarray]
"""The header of a slot, and its block table: ``(blocks,)`` uint64."""


def heads_blocks(extents: Extents) -> int:
    """How many blocks of a parity file the heads take: its first parity block is the next one."""
    return extents.manifest_room // extents.block_nbytes


def pack_heads(heads: Sequence[Head]) -> bytes:
    """Encode the heads of a group, in the order of its ranks."""
    return b"".join(header.pack() + table.tobytes() for header, table in heads)


def read_heads(slot: Slot) -> list[Head]:
    """Decode and check the heads in a sealed parity file, by rank of its group. Raises CorruptSlot if they differ."""
    assert slot.header is not None
    raw = slot.body(slot.header.extents)[: slot.header.manifest_nbytes].tobytes()
    return decode_heads(raw, slot.header, slot.name)


def decode_heads(raw: bytes, of: Header, name: str) -> list[Head]:
    """Decode the heads of a group from a parity file's bytes. Raises CorruptSlot if its header does not match."""
    heads = []
    at = 0
    for rank in of.group:
        header = unpack(raw[at : at + HEADER_NBYTES])
        at += HEADER_NBYTES
        end = at + header.extents.blocks * CHECK_NBYTES
        if end > len(raw) or (header.rank, header.attempt) != (rank, of.attempt):
            raise CorruptSlot(f"the heads in {name} are not those of its group", rank=of.rank)
        table = np.frombuffer(raw[at:end], dtype="<u8")
        if table_check(table) != header.table_check:
            raise CorruptSlot(f"a block table in {name} is not what its header says", rank=of.rank)
        heads.append((header, table))
        at = end
    if at != len(raw):
        raise CorruptSlot(f"the heads in {name} are longer than they say", rank=of.rank)
    return heads
