"""Damaged blocks of own slots → repaired in place from copies on other nodes.

A block comes from the first partner whose copy of it is whole. It is written only if it matches the table of the
damaged slot. Nothing is unsealed: whatever happens meanwhile, no block gets worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from ..errors import CorruptSlot
from ..memory.slot import Slot, Use
from ..memory.slot_header import Attempt
from ..mpi.nonblocking import Operation, done
from ..mpi.world import World
from ..redundancy.slot_transfer import slot_of
from ..startup.context import Context

_BLOCK = 51


def repair(context: Context, home: Slot, attempt: Attempt, damaged: Mapping[int, Sequence[int]]) -> None:
    """Repair blocks that copies have. Collective over the world.

    Args:
        home: the own slot; its table is whole if any of its blocks are damaged.
        attempt: the attempt that all own slots hold.
        damaged: by rank, the bad blocks of its own slot; the same on all ranks.
    """
    world, placement = context.world, context.protection.placement
    held = {rank: copy for rank in damaged if (copy := _copy_of(context, rank, attempt)) is not None}
    mine = {rank: _good(copy, damaged[rank]) for rank, copy in held.items()}
    good: list[dict[int, list[int]]] = world.gather(mine)
    work: list[Operation] = []
    waits: set[int] = set()
    for rank, blocks in damaged.items():
        left = list(blocks)
        for partner in placement.partners[rank]:
            has = set(good[partner].get(rank, ()))
            given, left = [b for b in left if b in has], [b for b in left if b not in has]
            if given and partner == world.rank:
                work.append(_send(world, held[rank], rank, given))
                waits.add(rank)
            elif given and rank == world.rank:
                work.append(_receive(world, home, partner, given))
                waits.add(partner)
    world.waiting_for = sorted(waits)
    world.drive(work)
    world.waiting_for = ()


def _copy_of(context: Context, owner: int, attempt: Attempt) -> Slot | None:
    """The copy of another rank's slot that this rank holds, if its table is whole."""
    for slot in context.pool.inbox.get(owner, ()):
        if owner != context.world.rank and slot.use is Use.HOLDS and slot.header is not None:
            try:
                slot.verify_table()
            except CorruptSlot:
                continue
            if slot_of(owner, attempt)(slot.header):
                return slot
    return None


def _good(copy: Slot, blocks: Sequence[int]) -> list[int]:
    assert copy.header is not None
    extents = copy.header.extents
    table = copy.table(extents)
    return [b for b in blocks if b < extents.blocks and copy.check_blocks(extents, b, b + 1)[0] == table[b]]


def _send(world: World, copy: Slot, peer: int, blocks: Sequence[int]) -> Operation:
    assert copy.header is not None
    extents = copy.header.extents
    body = copy.body(extents)
    for block in blocks:
        yield from done(world.data.Isend([body[extents.block(block)], world.mpi.BYTE], peer, _BLOCK))
        yield True


def _receive(world: World, home: Slot, peer: int, blocks: Sequence[int]) -> Operation:
    assert home.header is not None
    extents = home.header.extents
    body, table = home.body(extents), home.table(extents)
    for block in blocks:
        arrived = np.empty_like(body[extents.block(block)])
        yield from done(world.data.Irecv([arrived, world.mpi.BYTE], peer, _BLOCK))
        if xxhash.xxh3_64_intdigest(arrived.data) == int(table[block]):
            body[extents.block(block)] = arrived
        yield True
