"""Receipts → agreement → generation: what the courier does for one save.

    announce    what each rank sends; whether all can; whether somebody needs larger slots     1 allreduce
    protect     checksum, transfer, verify; the own slot and the copies are sealed
    agree       every slot sealed, every copy verified, on every rank                           1 allreduce
    record      a receipt in each slot; older slots may be written again

A rank that cannot save still goes through all of it, with a failed receipt, so that nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .board import Word
from .errors import MlflashError, SaveFailed, StepOrderError
from .header import Attempt, Header
from .layout import Extents
from .parts import Parts
from .points import reach
from .segment import Segment
from .shelf import needs_room
from .slot import Slot
from .snapshot import Snapshot
from .stage import Plan
from .transfer import Source


class Save:
    """One save on its way through the courier.

    Attributes:
        problem: why this rank cannot take part; it then only sends a failed receipt.
        skip: this rank's slots are busy and the save is to be skipped on all ranks.
        stage: fills the slot, where the main thread could not because the slot was too small; it then waits.
        segment: the mapping that was staged into.
        staged: set when the slot is filled, or the save has ended.
    """

    def __init__(self, snapshot: Snapshot, attempt: Attempt):
        self.snapshot = snapshot
        self.attempt = attempt
        self.slot: Slot | None = None
        self.plan: Plan | None = None
        self.segment: Segment | None = None
        self.problem: MlflashError | None = None
        self.skip = False
        self.stage: Callable[[], None] | None = None
        self.staged = threading.Event()

    @property
    def extents(self) -> Extents | None:
        if self.plan is None or self.problem is not None or self.skip:
            return None
        return self.plan.layout.extents


def run(save: Save, parts: Parts) -> None:
    """Bring one save to its end. Collective over the world.

    Raises:
        SaveFailed: on all ranks; the last committed step is untouched.
    """
    error: MlflashError | None = None
    try:
        _announce(save, parts)
        if not save.snapshot.skipped:
            _protect(save, parts)
    except MlflashError as problem:  # all ranks agreed on it, so that nothing is on its way any more
        error = problem
    # After any other exception no slot is released: MPI may still write into some, and the older step is needed.
    committed = error is None and not save.snapshot.skipped
    if save.slot is not None:
        parts.shelf.release(save.attempt, save.slot, committed)
    if committed:
        reach("commit.released")
    save.stage = None  # it holds the live state
    save.snapshot.end(SaveFailed("skipped: both slots of a rank were busy") if save.snapshot.skipped else error)
    save.staged.set()
    if error is not None:
        raise error
    if committed:
        reach("commit.seen")


def refuse(save: Save, error: MlflashError) -> None:
    """End a save that the courier cannot bring to its end. Not collective."""
    save.snapshot.end(error)
    save.staged.set()


def _announce(save: Save, parts: Parts) -> None:
    world, shelf = parts.world, parts.shelf
    extents = save.extents
    demand = parts.protection.offer(shelf, extents)
    if extents is not None and save.slot is not None:
        demand.insert(0, (save.slot, extents.nbytes))  # first: the main thread waits for its pages
        if save.stage is not None:  # both own slots at once, as the main thread waits and uses neither
            demand += [(slot, extents.nbytes) for slot in shelf.own if slot is not save.slot]
    failed = world.rank if save.problem is not None else world.size
    grow = any(needs_room(slot, nbytes) for slot, nbytes in demand)
    step = save.snapshot.step
    first_failed, can_wait, low, high, no_skip = world.agree([failed, int(not grow), step, -step, int(not save.skip)])
    if first_failed < world.size:
        raise world.broadcast(save.problem, first_failed)
    if low != -high:
        found = f"steps {low} to {-high}, {step} here"
        raise StepOrderError("the ranks are not saving the same step", expected="one step on all ranks", found=found)
    save.snapshot.skipped = not no_skip
    reach("protect.announced")
    if not can_wait and no_skip:
        parts.make_room(demand, save.slot if save.stage is not None else None)


def _protect(save: Save, parts: Parts) -> None:
    world = parts.world
    assert save.slot is not None and save.plan is not None
    if save.stage is not None:
        try:
            save.stage()
        except MlflashError as error:
            save.problem = error
        save.staged.set()
    source = Source(save.slot, save.plan.layout.extents, lambda check: _header(save, parts, check))
    whole = parts.protection.protect(parts.shelf, source, save.attempt)
    reach("protect.sealed")
    if save.problem is None and not whole:
        save.problem = SaveFailed("its redundancy did not arrive whole", rank=world.rank, node=world.node_name,
                                  step=save.snapshot.step)  # fmt: skip
    world.raise_together(save.problem)
    reach("commit.agreed")
    save.slot.record_commit(save.attempt, save.snapshot.step)
    reach("commit.half_recorded")
    for slot in parts.protection.kept(parts.shelf, save.attempt):
        slot.record_commit(save.attempt, save.snapshot.step)
    reach("commit.recorded")
    parts.shelf.drop_spare()
    parts.board.put(Word.COMMITTED_GENERATION, save.attempt.generation)
    parts.board.put(Word.COMMITTED_STEP, save.snapshot.step)


def _header(save: Save, parts: Parts, check: int) -> Header | None:
    if save.problem is not None or save.plan is None or save.slot is None:
        return None  # staging failed: this slot must never look whole
    if save.slot.segment is not save.segment:
        raise AssertionError("the slot got another file after it was staged")
    world = parts.world
    return Header(
        attempt=save.attempt,
        step=save.snapshot.step,
        rank=world.rank,
        world_size=world.size,
        node_index=world.node_index,
        local_rank=world.local_rank,
        manifest_nbytes=len(save.plan.manifest),
        extents=save.plan.layout.extents,
        table_check=check,
        unix_ns=time.time_ns(),
        node=world.node_name,
        scheme=parts.protection.scheme,
        job=parts.config.job,
        group=parts.protection.group,
    )
