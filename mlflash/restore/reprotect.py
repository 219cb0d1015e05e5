"""Copies and parity that are missing are made: of the restored step, and of what an ended courier left."""

from __future__ import annotations

import logging

from ..commit.courier_state import CourierState
from ..crash_points import reach
from ..errors import CorruptSlot, MlflashError
from ..memory.slot import Attempt, Slot
from ..protect.transfer import Source

log = logging.getLogger("mlflash")

_TRIES = 3


def give_receipts(*slots: Slot) -> None:
    """Write the commit receipt: with it, every remaining node knows that the step was committed."""
    for slot in slots:
        if slot.header is not None and not slot.committed:
            slot.record_commit(slot.header.attempt, slot.header.step)


def reprotect_or_remember(context: CourierState, home: Slot) -> None:
    """Call `reprotect`, with a few retries. If it fails, this is remembered, and each later save first tries again."""
    for _ in range(_TRIES):
        try:
            reprotect(context, home)
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


def reprotect_left(context: CourierState) -> tuple[int | None, int]:
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
        reprotect_or_remember(context, home)
    assert home.header is not None
    counts = context.unprotected is None or not context.restored.rolled_forward
    return (home.header.step, attempt.generation) if counts else (None, 0)


def reprotect(context: CourierState, home: Slot) -> None:
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
    reach("reprotect.begun")
    if some_lack:
        protect_missing(context, home, lacking)
        reach("reprotect.copied")
    kept = protection.kept(pool, header.attempt)
    give_receipts(home, *kept)
    shares = [slot for slot in pool.shares if slot.header is not None and slot.header.attempt == header.attempt]
    pool.keep_only([home, *shares, *kept])
    pool.drop_spare()
    reach("reprotect.freed")
    # Make room for the next save.
    demand = [(slot, header.extents.nbytes) for slot in pool.own]
    demand += [(slot, share.header.extents.nbytes) for share in shares if share.header for slot in pool.shares]
    for owner, pair in pool.inbox.items():
        sizes = [copy.header.extents.nbytes for copy in kept if copy.header is not None and copy.header.rank == owner]
        demand += [(slot, nbytes) for nbytes in sizes for slot in pair]
    context.ensure_room(demand)
    reach("reprotect.done")


def protect_missing(context: CourierState, home: Slot, lacking: bool) -> None:
    """Make the copies and parity that `Protection.missing` has found to be missing. Collective over the world."""
    world, pool, protection = context.world, context.pool, context.protection
    header = home.header
    assert header is not None
    context.recorder.counts["slots reprotected"] += lacking
    demand = protection.offer(pool, header.extents if lacking else None, only_missing=True)
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
