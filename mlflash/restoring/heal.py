"""Heal the restored step on all nodes: copies and parity are checked, and made again if they are missing."""

from __future__ import annotations

import logging

from ..crash_points import reach
from ..errors import CorruptSlot, MlflashError
from ..memory.slot import Slot
from ..memory.slot_header import Attempt
from ..redundancy.slot_transfer import Source
from ..startup.context import Context

log = logging.getLogger("mlflash")

_HEAL_TRIES = 3


def give_receipts(*slots: Slot) -> None:
    """Write the commit receipt into slots that came from another node, or that were rolled forward and are now whole.

    With it, every remaining node knows that the step was committed.
    """
    for slot in slots:
        if slot.header is not None and not slot.committed:
            slot.record_commit(slot.header.attempt, slot.header.step)


def heal_or_remember(context: Context, home: Slot) -> None:
    """Heal, with a few retries. What cannot be healed now is remembered, and each later save first tries again.

    Collective over the world.
    """
    for _ in range(_HEAL_TRIES):
        try:
            heal(context, home)
        except MlflashError as error:  # the same on all ranks
            if context.unhealed is None and context.world.rank in (0, error.rank):
                log.warning("the restored step has no full redundancy: %s", error)
            context.unhealed = home
            if not isinstance(error, CorruptSlot):
                return  # only a copy that arrived damaged may arrive whole at another try
        else:
            context.unhealed = None
            assert home.header is not None
            context.pool.free_older(home.header.attempt)
            return


def protect_left(context: Context) -> tuple[int | None, int]:
    """Make the redundancy whole of the newest attempt in memory, as a courier may have died before it was.

    Collective over the world. The slots of all ranks may be sealed although no rank has agreed that all copies are:
    then the attempt counts as committed only when they are. Until then the attempt before is kept.

    Returns:
        Step and generation of what counts as committed; None and 0: nothing does.
    """
    world, pool, attempt = context.world, context.pool, context.left
    home = next((slot for slot in pool.own if slot.header is not None and slot.header.attempt == attempt), None)
    if not world.agree([int(home is not None)])[0] or home is None or attempt is None:
        pool.free_older(attempt or Attempt(bytes(16), 0))
        return None, 0
    is_whole = context.protection.is_complete(pool, attempt)
    unseen, all_whole = world.agree([int(not home.committed), int(is_whole)])
    context.rolled_forward = bool(unseen)
    if all_whole:
        give_receipts(home, *context.protection.kept(pool, attempt))
        pool.free_older(attempt)
    else:
        heal_or_remember(context, home)
    assert home.header is not None
    counts = context.unhealed is None or not context.rolled_forward
    return (home.header.step, attempt.generation) if counts else (None, 0)


def heal(context: Context, home: Slot) -> None:
    """Make the copies and parity of the restored attempt in their new places; then free everything else.

    Collective over the world.

    Raises:
        MemoryTooSmall, SaveFailed: on all ranks; what was there before is untouched.
    """
    world, pool, protection = context.world, context.pool, context.protection
    header = home.header
    assert header is not None
    if not context.rolled_forward:
        pool.drop_stale()
    lacking = protection.missing(pool, header.attempt)
    whole = world.agree([int(not lacking)])[0]
    reach("heal.begun")
    if not whole:
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


def protect_again(context: Context, home: Slot, lacking: bool) -> None:
    """Make again what `Protection.missing` has found to be missing. Collective over the world.

    Args:
        home: the own slot, whole.
        lacking: whether this rank's redundancy is missing.

    Raises:
        MlflashError: on all ranks.
    """
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
