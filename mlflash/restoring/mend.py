"""Damage that was found at rest: all ranks repair it together, before the next save is protected.

    heads    header and block table of what a rank holds: from what the rank knows, if the blocks agree with it
    blocks   of own slots: from copies, then from parity, in place
    again    copies and parity files, next to the damaged ones, which are deleted only when the new ones are whole

Nothing that is damaged is given up before there is something better: at any time, a restore finds what it would have
found without this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from ..crash_points import reach
from ..errors import MlflashError
from ..memory.inventory import file_number
from ..memory.slot import Slot, Use, read_header, table_check
from ..memory.slot_header import Attempt
from ..startup.choose_checkpoint import choose
from ..startup.context import Context
from .heal import give_receipts, protect_again
from .rebuild_from_parity import Repairs
from .repair_from_copies import repair
from .scrubber import Scrubber

log = logging.getLogger("mlflash")


def mend(context: Context, scrubber: Scrubber) -> None:
    """Repair what can be repaired. Collective over the world; in a job, while no save is being protected.

    What cannot be repaired stays as it is. No rank counts as damaged afterwards: the next finding begins anew.
    """
    context.damaged = False
    start, world = time.perf_counter(), context.world
    home = max((slot for slot in context.pool.own if slot.use is Use.HOLDS and slot.header is not None),
               key=lambda slot: slot.generation, default=None)  # fmt: skip
    told = None if home is None or home.header is None or context.unhealed is not None else home.header
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
    if world.agree([int(is_whole)])[0]:
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


def _repair_own(context: Context, home: Slot, attempt: Attempt) -> tuple[int, bool]:
    """Repair the own slots of all ranks; return how many blocks were repaired here, and whether this slot is whole.

    Collective over the world.
    """
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
    if damaged and context.protection.placement.parity_groups and world.agree([int(bad is not None)])[0]:
        _repair_from_parity(context, home, attempt, damaged)
        left = _still_bad(home, left)
    return len(bad or ()) - len(left), bad is not None and not left


def _bad_blocks(context: Context, home: Slot) -> list[int] | None:
    """The bad blocks of a slot; None if its table is damaged."""
    assert home.header is not None
    if table_check(home.table(home.header.extents)) != home.header.table_check:
        return None
    return home.bad_blocks(home.header.extents, context.copy_threads)


def _still_bad(home: Slot, blocks: Sequence[int] | None) -> list[int]:
    assert home.header is not None
    extents = home.header.extents
    table = home.table(extents)
    return [b for b in blocks or () if home.check_blocks(extents, b, b + 1)[0] != table[b]]


def _repair_from_parity(context: Context, home: Slot, attempt: Attempt, damaged: Mapping[int, list[int]]) -> None:
    """Repair blocks from parity; each member of a group must read its own slot. Collective over the world."""
    world = context.world
    choice = choose(context.take_stock().of(attempt), world.topology.node_of)
    is_mine = choice is not None and choice.source[world.rank] == (world.node_index, file_number(home.name))
    if not world.agree([int(is_mine)])[0] or choice is None:
        return
    able = {rank: blocks for rank, blocks in damaged.items() if choice.group_of(rank) is not None}
    repairs = Repairs(context, choice, range(world.size), {world.rank: home}, able)
    if able and not repairs.beyond:
        repairs.run()
    repairs.close()


def _make_again(context: Context, home: Slot, attempt: Attempt) -> int:
    """Make copies and parity again that are not whole; return how many were made here. Collective over the world."""
    world, pool, protection = context.world, context.pool, context.protection
    before = _holding(context, attempt)
    lacking = protection.missing(pool, attempt, forget=False)
    has_room = all(any(slot.use is Use.FREE for slot in pair) for pair in pool.inbox.values())
    is_whole, can = world.agree([int(not lacking), int(has_room)])
    if is_whole or not can:
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


def _holding(context: Context, attempt: Attempt) -> list[Slot]:
    """The copies and parity files of an attempt that must not be written now."""
    return [slot for slot in context.protection.kept(context.pool, attempt) if slot.use is Use.HOLDS]


def _is_whole(context: Context, slot: Slot) -> bool:
    assert slot.header is not None
    return read_header(slot.view) == slot.header and _bad_blocks(context, slot) == []
