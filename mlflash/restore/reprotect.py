"""Redundancy is made whole: of the restored step, on all nodes, and where damage was found at rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from ..courier.choose_checkpoint import choose
from ..courier.state import CourierState
from ..crash_points import reach
from ..errors import CorruptSlot, MlflashError
from ..memory.node_directory import file_number
from ..memory.slot import Attempt, Slot, Use, read_header, table_check
from ..mpi.nonblocking import Operation, done
from ..mpi.world import World
from ..protect.transfer import Source, slot_of
from .rebuild import Repairs
from .scrub import Scrubber

log = logging.getLogger("mlflash")

_HEAL_TRIES = 3
_BLOCK = 51


def give_receipts(*slots: Slot) -> None:
    """Write the commit receipt: with it, every remaining node knows that the step was committed."""
    for slot in slots:
        if slot.header is not None and not slot.committed:
            slot.record_commit(slot.header.attempt, slot.header.step)


def heal_or_remember(context: CourierState, home: Slot) -> None:
    """Heal, with a few retries. What cannot be healed now is remembered, and each later save first tries again."""
    for _ in range(_HEAL_TRIES):
        try:
            heal(context, home)
        except MlflashError as error:  # the same on all ranks
            if context.unprotected is None and context.world.rank in (0, error.rank):
                log.warning("the restored step has no full redundancy: %s", error)
            context.unprotected = home
            if not isinstance(error, CorruptSlot):
                return  # only a copy that arrived damaged may arrive whole at another try
        else:
            context.unprotected = None
            assert home.header is not None
            context.pool.free_older(home.header.attempt)
            return


def protect_left(context: CourierState) -> tuple[int | None, int]:
    """Make the redundancy whole of the newest attempt in memory, as a courier may have died before it was.

    Collective over the world. The slots of all ranks may be sealed although no rank has agreed that all copies are:
    then the attempt counts as committed only when they are. Until then the attempt before is kept. Return step and
    generation of what counts as committed; None and 0: nothing does.
    """
    world, pool, attempt = context.world, context.pool, context.left.attempt
    home = next((slot for slot in pool.own if slot.header is not None and slot.header.attempt == attempt), None)
    if not world.all_of(home is not None) or home is None or attempt is None:
        pool.free_older(attempt or Attempt(bytes(16), 0))
        return None, 0
    is_whole = context.protection.is_complete(pool, attempt)
    agreed = world.agree(any_of={"seen": home.committed}, all_of={"whole": is_whole})
    context.restored.rolled_forward = not agreed.seen
    if agreed.whole:
        give_receipts(home, *context.protection.kept(pool, attempt))
        pool.free_older(attempt)
    else:
        heal_or_remember(context, home)
    assert home.header is not None
    counts = context.unprotected is None or not context.restored.rolled_forward
    return (home.header.step, attempt.generation) if counts else (None, 0)


def heal(context: CourierState, home: Slot) -> None:
    """Make the copies and parity of the restored attempt in their new places; then free everything else. Collective.

    Raises:
        MemoryTooSmall, SaveFailed: on all ranks; what was there before is untouched.
    """
    world, pool, protection = context.world, context.pool, context.protection
    header = home.header
    assert header is not None
    if not context.restored.rolled_forward:
        pool.drop_stale()
    lacking = protection.missing(pool, header.attempt)
    some_lack = world.any_of(lacking)
    reach("heal.begun")
    if some_lack:
        protect_again(context, home, lacking)
        reach("heal.copied")
    kept = protection.kept(pool, header.attempt)
    give_receipts(home, *kept)
    shares = [slot for slot in pool.shares if slot.header is not None and slot.header.attempt == header.attempt]
    pool.keep_only([home, *shares, *kept])
    pool.drop_spare()
    reach("heal.freed")
    # Make room for the next save.
    demand = [(slot, header.extents.nbytes) for slot in pool.own]
    demand += [(slot, share.header.extents.nbytes) for share in shares if share.header for slot in pool.shares]
    for owner, pair in pool.inbox.items():
        sizes = [copy.header.extents.nbytes for copy in kept if copy.header is not None and copy.header.rank == owner]
        demand += [(slot, nbytes) for nbytes in sizes for slot in pair]
    context.ensure_room(demand)
    reach("heal.done")


def protect_again(context: CourierState, home: Slot, lacking: bool) -> None:
    """Make again what `Protection.missing` has found to be missing. Collective over the world."""
    world, pool, protection = context.world, context.pool, context.protection
    header = home.header
    assert header is not None
    context.recorder.counts["slots healed"] += lacking
    demand = protection.offer(pool, header.extents if lacking else None, again=True)
    context.ensure_room(demand, pairs=False)  # of each pair, the other slot may hold the last copy of the step before
    whole = protection.protect(pool, Source(home, header.extents, None, context.pace), header.attempt)
    error: MlflashError | None = None
    if not whole:
        error = CorruptSlot(
            "its copies or parity did not arrive whole", rank=world.rank, node=world.node_name, step=header.step
        )
    try:
        world.raise_together(error)
    except MlflashError:  # if a copy failed on any rank, its slot must be free for the next save
        pool.release(header.attempt, [home], False)
        raise
    pool.release(header.attempt, [home], True)


# Damage at rest, repaired before the next save is protected: first header and block table, where the blocks agree
# with them; then blocks of own slots, from copies and parity, in place; then copies and parity files, next to the
# damaged ones. Nothing damaged is given up before there is something better: a restore finds what it found before.


def mend(context: CourierState, scrubber: Scrubber) -> None:
    """Repair what can be repaired. Collective over the world; in a job, while no save is being protected.

    What cannot be repaired stays as it is. No rank counts as damaged afterwards: the next finding begins anew.
    """
    context.damaged = False
    start, world = time.perf_counter(), context.world
    home = max((slot for slot in context.pool.own if slot.use is Use.HOLDS and slot.header is not None),
               key=lambda slot: slot.generation, default=None)  # fmt: skip
    told = None if home is None or home.header is None or context.unprotected is not None else home.header
    attempts = world.gather(None if told is None else (told.attempt, told.world_size))
    if home is None or told is None or any(one != (told.attempt, world.size) for one in attempts):
        return  # on all ranks: there is no attempt that all of them hold
    reach("mend.begun")
    found = scrubber.damaged
    for slot in (home, *_holding(context, told.attempt)):
        _restore_head(slot)
    blocks, is_whole = _repair_own(context, home, told.attempt)
    reach("mend.repaired")
    made = 0
    if world.all_of(is_whole):
        made = _make_again(context, home, told.attempt)
    else:
        is_lost = [rank for rank, whole in enumerate(world.gather(is_whole)) if not whole]
        if world.rank == 0:
            log.warning("step %d: the slots of ranks %s stay damaged because neither copies nor parity can "
                        "repair them; the next commit replaces them", told.step, is_lost)  # fmt: skip
    reach("mend.done")
    world.renew_deadline()
    whole = [slot for slot in found if slot.use is not Use.HOLDS or _is_whole(context, slot)]
    scrubber.forget(whole)
    if found or blocks or made:
        left = len(found) - len(whole)
        context.recorder.mended(told.step, time.perf_counter() - start, blocks, made, left)
        log.info("rank %d repaired what it holds of step %d: %d blocks repaired, %d files made again, %d still "
                 "damaged",
                 world.rank, told.step, blocks, made, left)  # fmt: skip


def _restore_head(slot: Slot) -> None:
    """Write header and block table of a slot as they were, if that is known."""
    header = slot.header
    assert header is not None
    extents = header.extents
    if table_check(slot.table(extents)) != header.table_check:
        made = slot.check_blocks(extents, 0, extents.blocks)
        if table_check(made) != header.table_check:
            return  # blocks are damaged as well
        slot.table(extents)[:] = made
    if read_header(slot.view) != header:
        slot.seal(header)
        give_receipts(slot)


def _repair_own(context: CourierState, home: Slot, attempt: Attempt) -> tuple[int, bool]:
    """Repair the own slots of all ranks; return how many blocks were repaired here, and whether this slot is whole."""
    world = context.world
    bad = _bad_blocks(context, home)
    # A slot whose table is lost takes no part, because nothing tells what its blocks must be.
    damaged = {rank: one for rank, one in enumerate(world.gather(bad)) if one}
    if not damaged:
        return 0, bad is not None
    repair(context, home, attempt, damaged)
    left = _still_bad(home, bad)
    context.recorder.counts["blocks repaired"] += len(bad or ()) - len(left)
    damaged = {rank: one for rank, one in enumerate(world.gather(left)) if one}
    if damaged and context.protection.placement.parity_groups and world.all_of(bad is not None):
        _repair_from_parity(context, home, attempt, damaged)
        left = _still_bad(home, left)
    return len(bad or ()) - len(left), bad is not None and not left


def _bad_blocks(context: CourierState, home: Slot) -> list[int] | None:
    """The bad blocks of a slot; None if its table is damaged."""
    assert home.header is not None
    if table_check(home.table(home.header.extents)) != home.header.table_check:
        return None
    return home.bad_blocks(home.header.extents, context.copy_threads)


def _still_bad(home: Slot, blocks: Sequence[int] | None) -> list[int]:
    good = _good(home, blocks or ())
    return [block for block in blocks or () if block not in good]


def _repair_from_parity(context: CourierState, home: Slot, attempt: Attempt, damaged: Mapping[int, list[int]]) -> None:
    """Repair blocks from parity; each member of a group must read its own slot."""
    world = context.world
    choice = choose(context.take_stock().of(attempt), world.topology.node_of)
    is_mine = choice is not None and choice.source[world.rank] == (world.node_index, file_number(home.name))
    if not world.all_of(is_mine) or choice is None:
        return
    able = {rank: blocks for rank, blocks in damaged.items() if choice.group_of(rank) is not None}
    repairs = Repairs(context, choice, range(world.size), {world.rank: home}, able)
    if able and not repairs.beyond:
        repairs.run()
    repairs.close()


def _make_again(context: CourierState, home: Slot, attempt: Attempt) -> int:
    """Make copies and parity again that are not whole; return how many were made here."""
    world, pool, protection = context.world, context.pool, context.protection
    before = _holding(context, attempt)
    lacking = protection.missing(pool, attempt, forget=False)
    has_room = all(any(slot.use is Use.FREE for slot in pair) for pair in pool.inbox.values())
    agreed = world.agree(any_of={"lacking": lacking}, all_of={"have_room": has_room})
    if not agreed.lacking or not agreed.have_room:
        return 0
    try:
        protect_again(context, home, lacking)
    except MlflashError as error:  # the same on all ranks
        if world.rank in (0, error.rank):
            log.warning("copies or parity could not be made again: %s", error)
        return 0
    reach("mend.copied")
    new = [slot for slot in _holding(context, attempt) if not any(slot is one for one in before)]
    give_receipts(*new)
    for pair in pool.inbox.values():
        if any(slot is one for one in new for slot in pair):
            for slot in pair:
                if any(slot is one for one in before):
                    slot.unseal()
                    slot.use = Use.FREE
    return len(new)


def _holding(context: CourierState, attempt: Attempt) -> list[Slot]:
    return [slot for slot in context.protection.kept(context.pool, attempt) if slot.use is Use.HOLDS]


def _is_whole(context: CourierState, slot: Slot) -> bool:
    assert slot.header is not None
    return read_header(slot.view) == slot.header and _bad_blocks(context, slot) == []


# A block comes from the first partner whose copy of it is whole, and is written only if it matches the table of the
# damaged slot. Nothing is unsealed: whatever happens meanwhile, no block gets worse.


def repair(context: CourierState, home: Slot, attempt: Attempt, damaged: Mapping[int, Sequence[int]]) -> None:
    """Repair blocks that copies have; ``home``: the own slot, with a whole table if any of its blocks are damaged.

    Collective over the world.
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


def _copy_of(context: CourierState, owner: int, attempt: Attempt) -> Slot | None:
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
