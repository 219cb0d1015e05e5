"""What the courier does for one save.

    announce    what each rank sends; whether all can; whether a rank needs larger slots       1 allreduce
    settle      only if a structure is new: what of it is shared; then it is announced again
    make room   only if a slot is too small: it is made larger, and the trainer stages its state
    finish      what `until=` has left is copied
    confirm     whether ranks that share hold the same; then the shares are sealed             1 among these
    protect     checksum, transfer, verify; the own slot and the copies are sealed
    agree       every slot sealed, every copy verified, on every rank; which rank was late     1 allreduce
    record      the commit in each slot; older slots may be written again

A rank that cannot save still takes part in all of it and says why, so that no rank waits for it. Work that concerns one
rank alone, and may raise anything (tensors, devices, adapters), is done by `_locally`: whatever goes wrong becomes the
one outcome that all ranks agree on, as text, and the next save continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from ..channel.records import SaveRequest, Trainer
from ..crash_points import reach
from ..errors import MlflashError, SaveFailed, StepOrderError, SuspectState, text_of
from ..memory.slot import Attempt, Header, Slot, Verdict
from ..protect.deduplication import ShareableLeaf, all_checks
from ..protect.transfer import Source
from ..protect.value_checks import in_words
from ..state.layout import Extents
from .certification import Saved, ValueChecks, certify, report_suspect
from .courier_state import CourierState, needs_room

log = logging.getLogger("mlflash")


class RankSkippedSave(Exception):
    """The other ranks have not come to this save yet: this rank has left one out."""


class RepairFirst(Exception):
    """Some rank has damage at rest: all ranks must repair it before this save."""


class Save:
    """One save that the courier is working on."""

    def __init__(self, request: SaveRequest, trainer: Trainer, state: CourierState, is_restored: bool = False):
        self.request, self.trainer = request, trainer
        self.attempt = Attempt(bytes(16), 0)  # its number, which the ranks agree on when they announce it
        leased = state.pool.leased(request.lease)
        for slot in leased:
            slot.header = None
        # slot, share: where the state is staged; None: nowhere
        self.slot: Slot | None
        self.share: Slot | None
        self.slot, self.share = leased or (None, None)
        self.skipped = False  # whether all ranks skip it because the slots of one rank are busy
        # drain_asked: whether a drain was asked for: at first on this rank, and on any rank once that was agreed on
        # drains_idle: whether no drain is running: at first on this rank, and on any rank once that was agreed on
        self.drains_idle, self.drain_asked = True, False
        # whether it is an older checkpoint that was put together again: what is newer in memory stays
        self.is_restored = is_restored
        # is_given_up: whether it may be overwritten at once, because an older step is kept
        # is_suspect: whether the values of any rank are suspect, once that was agreed on
        self.is_suspect = self.is_given_up = False
        # whether the history gets it; to be agreed on: whether it may, and whether it is time for it
        self.is_kept = False
        self.due: Saved | None = None  # what may be certified now that this save is committed
        self.value_checks: ValueChecks | None = None
        self.times = PhaseTimes(lambda: state.world.waited_s, request.filled_s - request.begun_s)

    @property
    def extents(self) -> Extents | None:
        """The extents of what this rank sends; None: nothing."""
        if self.request.plan is None or self.request.problem is not None or self.request.skip:
            return None
        return self.request.plan.layout.extents

    def fail(self, problem: MlflashError | None) -> None:
        """Note why this rank cannot save; what was noted before stays. None: nothing is wrong."""
        self.request.problem = self.request.problem or problem


def run(save: Save, state: CourierState, committed_now: Callable[[], None] = lambda: None) -> None:
    """Run one save to its end. Collective over the world.

    Args:
        committed_now: called once it is committed, before the snapshot says so.

    Raises:
        SaveFailed: on all ranks; the last committed step is untouched.
        RankSkippedSave: the other ranks come to this save with their next one: run it once more.
        RepairFirst: on all ranks, unless it is restored: repair first, and then run it once more.
    """
    error: MlflashError | None = None
    with save.times.of("deferred"):
        save.trainer.begin_deferred()
    try:
        if not _announce(save, state):
            _settle(save, state)
            _announce(save, state)
        if not save.skipped:
            _protect(save, state)
    except MlflashError as problem:
        if not problem.agreed:
            raise
        error = problem  # all ranks raise it, so nothing is in flight any more
    # After any other exception no slot is released: MPI may still write to some, and the older step is needed.
    committed = error is None and not save.skipped
    try:
        save.trainer.cancel_deferred()
    except MlflashError as problem:  # a device may still write: nobody gets these files, unless all copies were made
        if not committed:
            error = error or problem
            state.pool.end_lease(save.request.lease, [slot.inode for slot in state.pool.leased(save.request.lease)])
    if committed:
        save.due = state.certification.committed(Saved(save.attempt, save.request.step), save.is_suspect, save.is_kept)
        save.is_given_up = save.attempt not in state.certification.held
        state.kept_s = time.monotonic() if save.is_kept else state.kept_s
    state.pool.release(save.attempt, state.pool.leased(save.request.lease), committed, state.certification.held)
    try:
        if committed:
            reach("commit.released")
            committed_now()
        elif save.skipped:
            state.recorder.skipped(save.request.step)  # now, because a waiting caller may ask for it next
    finally:  # the save is agreed on, whatever happens next
        state.tell_trainer()  # before a caller that waits for the save continues
        skipped = SaveFailed("skipped: all slots of a rank were busy") if save.skipped else error
        save.trainer.ended(skipped, save.skipped)
        state.world.renew_deadline()
    if error is not None:
        raise error
    if committed:
        reach("commit.seen")


def _settle(save: Save, state: CourierState) -> None:
    """Agree on what is shared in a new structure."""
    request = save.request
    replicas = state.sharers
    if replicas is None:
        return
    leaves: list[ShareableLeaf] = []
    made: dict[int, int] = {}
    is_new = request.is_unsettled and request.problem is None
    if is_new:
        _locally(save, lambda: leaves.extend(save.trainer.shareable()))
    able = request.problem is None

    def digests(keys: Collection[int]) -> dict[int, int]:
        _locally(save, lambda: made.update(save.trainer.digests(keys)))
        return made

    def lay_out() -> None:
        request.plan = save.trainer.lay_out()

    settled = replicas.settle(leaves if is_new else None, digests, able, request.step)
    state.tell_trainer()
    if able and request.is_unsettled:
        _locally(save, lay_out)
        if not settled:
            replicas.version += 1  # so that the next save asks again
    request.is_unsettled = False


def _announce(save: Save, state: CourierState) -> bool:
    """Tell the other ranks; return False if some rank's structure is new and must be settled first."""
    request = save.request
    world, pool = state.world, state.pool
    save.times.begin_announcing()
    _locally(save, state.memory.renew)
    extents = save.extents
    demand = state.protection.offer(pool, extents)
    if extents is not None and save.slot is not None:
        own = [(save.slot, pool.own, extents)]
        if save.share is not None and request.plan is not None and request.plan.share_extents is not None:
            own.append((save.share, pool.shares, request.plan.share_extents))
        demand = [(slot, size.nbytes) for slot, _, size in own] + demand
        if request.waits_for_room:  # all slots at once: the main thread uses none
            demand += [(other, size.nbytes) for slot, pair, size in own for other in pair if other is not slot]
    grow = any(needs_room(slot, nbytes) for slot, nbytes in demand)
    step = request.step
    settled = not request.is_unsettled or request.problem is not None
    agreed = world.agree(
        all_of={"settled": settled, "drains_idle": save.drains_idle, "keep": state.may_keep},
        any_of={"grows": grow, "skips": request.skip, "drain_asked": save.drain_asked, "damaged": state.damaged,
                "failed": request.problem is not None},
        min_of={"low": step}, max_of={"high": step, "newest": state.generation},
    )  # fmt: skip
    save.times.announced()
    if agreed.damaged and not save.is_restored:
        raise RepairFirst
    if not agreed.settled:
        return False
    state.generation = 1 + agreed.newest
    save.attempt = Attempt(state.run_id, state.generation)
    save.drains_idle, save.drain_asked, save.is_kept = agreed.drains_idle, agreed.drain_asked, agreed.keep
    catches_up = agreed.low != agreed.high and _catches_up(state, step, agreed.low)
    if catches_up and step > agreed.low:
        raise RankSkippedSave
    if agreed.failed and not catches_up:
        world.raise_together(request.problem)
    if agreed.low != agreed.high:
        unlike = StepOrderError("the ranks are not saving the same step", expected="one step on all ranks",
                                found=f"steps {agreed.low} to {agreed.high}, {step} here")  # fmt: skip
        unlike.agreed = True
        raise unlike
    save.skipped = agreed.skips
    reach("protect.announced")
    if agreed.grows and not agreed.skips:
        waiting = state.pool.leased(request.lease) if request.waits_for_room else []
        state.make_room(demand, waiting, made=lambda: _stage(save, state))
    elif not agreed.skips:
        _stage(save, state)
    return True


def _stage(save: Save, state: CourierState) -> None:
    """Let the trainer fill its slots now, if it waits for room in them. Then training goes on."""

    def stage() -> None:
        save.request.inode, save.request.checks, _ = save.trainer.stage(state.pool.files_of(save.request.lease))
        save.trainer.handed_over()

    if save.request.waits_for_room:
        with save.times.of("copy"):
            _locally(save, stage)


def _catches_up(state: CourierState, step: int, low: int) -> bool:
    """Whether a rank that left saves out catches up: ranks that are ahead stay at their step, and the others continue.

    An exception, such as one of a signal handler, may have kept a rank from posting some saves, and its saves would
    stay ahead of the others' for good. The ranks treat it so if each rank that is ahead has already failed with the
    step that the others are at now, or with a later one: it stays, while the others end theirs and come to it. They do
    not if a rank goes back to an earlier step, as overlapping saves of a framework do: then all ranks have posted the
    same number of saves.

    Collective over the world, if the steps of the ranks differ. If a rank catches up, nothing else of this save is
    collective.
    """
    last = -1 if state.diverged_step is None else state.diverged_step
    catches_up = state.world.all_of(step > last if step == low else low <= last)
    if step == low or not catches_up:
        state.diverged_step = step
    return catches_up


def _locally(save: Save, work: Callable[[], object]) -> None:
    """Do what concerns this rank alone; whatever goes wrong makes the save fail, on all ranks."""
    try:
        work()
    except MlflashError as error:
        save.fail(error)
    except Exception as error:  # from torch, a device or an adapter
        save.fail(SaveFailed(f"the state could not be copied: {text_of(error)}"))


def _protect(save: Save, state: CourierState) -> None:
    world, request = state.world, save.request
    assert save.slot is not None and request.plan is not None
    value_checks = save.value_checks = ValueChecks(state, save.attempt.generation)

    def finish_deferred() -> None:
        problem, checks = save.trainer.finish_deferred()
        save.fail(problem)
        request.checks = {**request.checks, **checks}

    if request.problem is None:
        with save.times.of("deferred"):
            _locally(save, finish_deferred)
    _confirm(save, state)
    examine = value_checks.of_slot(request.plan, save.slot)
    source = Source(save.slot, request.plan.layout.extents, lambda check: _header(save, state, check), state.pace,
                    examine, state.copy_threads)  # fmt: skip
    start = time.perf_counter()
    all_arrived = state.protection.protect(state.pool, source, save.attempt)
    peers = [rank for rank in state.protection.group if rank != world.rank]
    state.recorder.protected(request.step, time.perf_counter() - start, request.plan.layout.extents.nbytes, peers)
    reach("protect.sealed")
    if save.is_kept and request.problem is None and not state.keep_on_disk(save.slot, *_shares(save)):
        save.fail(SaveFailed("its own state could not be written to the disk"))
    if request.problem is None and not all_arrived:
        request.problem = SaveFailed("its copies or parity did not arrive whole")
        request.problem.follows = True
    if request.problem is None and (removed := _removed(save, state)):
        request.problem = SaveFailed(f"somebody has removed {', '.join(removed)} from {state.memory.path}")
    findings = value_checks.findings
    report_suspect(state, request.step, findings)
    if request.problem is not None:
        request.problem.rank, request.problem.node = world.rank, world.node_name
    save.times.protected()
    durations = state.recorder.compare(world.size, save.attempt.generation, save.times.took)
    *least, not_suspect = world.least_or_raise([*durations, int(not findings)], request.problem)
    save.is_suspect = not not_suspect
    state.recorder.compared(least, world.topology.name_of)
    reach("commit.agreed")
    _record(save, state, [save.slot])
    reach("commit.half_recorded")
    _record(save, state, [*_beside(save, state), *_shares(save)])
    reach("commit.recorded")
    is_held = save.is_suspect and state.certification.has_better
    state.pool.drop_spare(committed=not (is_held or (save.is_restored and state.left.unusable)))


def _removed(save: Save, state: CourierState) -> list[str]:
    """The files of this rank's slots for a save that are in no directory any more."""
    slots = [save.slot, *_shares(save), *_beside(save, state)]
    return [slot.name for slot in slots if slot is not None and slot.is_gone]


def _record(save: Save, state: CourierState, slots: Iterable[Slot]) -> None:
    """Write the commit, and the verdict on the values, into slots that hold the attempt."""
    for slot in slots:
        if slot is not save.share:
            slot.record_commit(save.attempt, save.request.step)
        if state.examiner.is_on:
            slot.record_verdict(save.attempt, Verdict.SUSPECT if save.is_suspect else Verdict.PASSED)


def _beside(save: Save, state: CourierState) -> list[Slot]:
    """What is not in the trainer's hands: copies, parity, and what is kept on the disk."""
    return [*state.protection.kept(state.pool, save.attempt), *state.pool.kept_of(save.attempt)]


def _shares(save: Save) -> list[Slot]:
    return [] if save.share is None or save.share.header is None else [save.share]


def _confirm(save: Save, state: CourierState) -> None:
    """Seal this rank's share, if all ranks that hold it hold the same."""
    request = save.request
    replicas = state.sharers
    if replicas is None:
        return
    plan, share, value_checks = request.plan, save.share, save.value_checks
    assert plan is not None and share is not None and value_checks is not None
    extents = plan.share_extents
    checks: dict[int, int] = {}
    if extents is not None and request.problem is None:
        _locally(save, lambda: checks.update(all_checks(plan, share, request.checks)))
    save.fail(replicas.confirm(plan, checks if request.problem is None else None, request.step))
    reach("share.agreed")
    if extents is not None:
        examine = value_checks.of_share(plan, share)
        source = Source(share, extents, lambda check: _share_header(save, state, check), examine=examine)
        _locally(save, source.seal)
    reach("share.sealed")


def _share_header(save: Save, state: CourierState, check: int) -> Header | None:
    header = _header(save, state, check)
    plan = save.request.plan
    if header is None or plan is None or plan.sharing is None or plan.share_extents is None:
        return None
    return dataclasses.replace(
        header, manifest_nbytes=0, extents=plan.share_extents, group=plan.sharing.siblings, share=plan.sharing.share
    )


def _header(save: Save, state: CourierState, check: int) -> Header | None:
    request = save.request
    with save.times.of("deferred"):
        save.fail(save.trainer.is_changed())
    assert request.plan is not None and save.slot is not None and save.value_checks is not None
    if state.config.on_suspect == "raise" and (findings := save.value_checks.findings):
        save.fail(SuspectState(f"its values are suspect: {in_words(findings)}", tensor=findings[0].tensor))
    if request.problem is None and save.slot.inode != request.inode:
        save.fail(SaveFailed("the file of the slot was replaced after the state was copied to it"))
    if request.problem is not None:  # nothing may restore from the slot
        return None
    world = state.world
    return Header(
        attempt=save.attempt, step=request.step, rank=world.rank, world_size=world.size, node_index=world.node_index,
        local_rank=world.local_rank, manifest_nbytes=request.plan.manifest_nbytes, extents=request.plan.layout.extents,
        table_check=check, unix_ns=time.time_ns(), node=world.node_name, scheme=state.protection.scheme,
        job=state.config.job, group=state.protection.group,
        shared_by=-1 if request.plan.sharing is None else request.plan.sharing.by, mark=state.config.mark,
    )  # fmt: skip


class PhaseTimes:
    """The phases of one save; ``waited_s`` returns how long the courier has waited for anything so far."""

    def __init__(self, waited_s: Callable[[], float], copy_s: float):
        self._waited_s = waited_s
        self._since, self._waited = time.perf_counter(), waited_s()
        self.took = {"training": 0.0, "copy": max(0.0, copy_s), "deferred": 0.0, "checksums": 0.0, "transfer": 0.0}

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count the time of a ``with`` block as a phase, including its waits."""
        began, waited = time.perf_counter(), self._waited_s()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.took[phase] += seconds
            self._since += seconds
            self._waited += self._waited_s() - waited

    def begin_announcing(self) -> None:
        """Note that this rank is ready to save: from now on it waits for other ranks to come to the save."""
        self._waited = self._waited_s()

    def announced(self) -> None:
        """Note that all ranks have come to this save."""
        self.took["training"] = self._waited_s() - self._waited
        self._since, self._waited = time.perf_counter(), self._waited_s()

    def protected(self) -> None:
        """Note that this rank is ready to agree on the commit."""
        self.took["transfer"] = self._waited_s() - self._waited
        self.took["checksums"] = max(0.0, time.perf_counter() - self._since - self.took["transfer"])


class Drains(Protocol):
    """What a commit asks and tells the drains of its Checkpointer (`drain.drain_runs.DrainQueue`)."""

    @property
    def idle(self) -> bool: ...

    @property
    def asked(self) -> bool: ...

    def certified(self, attempt: Attempt) -> None: ...

    def committed(self, slot: Slot | None, share: Slot | None, asked: bool, idle: bool) -> None: ...


def bring_to_end(request: SaveRequest, trainer: Trainer, state: CourierState, drains: Drains,
                 reprotect: Callable[[Slot], None], repair: Callable[[], None]) -> None:  # fmt: skip
    """Commit what a trainer has staged, or tell it why that failed, and raise it as MlflashError on all ranks.

    Collective over the world, and so are ``reprotect`` and ``repair``.
    """
    start, world, recorder = time.perf_counter(), state.world, state.recorder
    save = Save(request, trainer, state)
    try:
        while True:
            if state.unprotected is not None:
                reprotect(state.unprotected)
            save.drains_idle, save.drain_asked = drains.idle, drains.asked
            try:
                run(save, state, lambda: _committed(save, state, drains))
                break
            except RankSkippedSave:
                world.job_number += 1
            except RepairFirst:  # afterwards no rank reports damage any more
                try:
                    repair()
                except MlflashError as error:
                    trainer.ended(error)
                    raise
        if save.is_given_up and world.rank == 0:
            log.warning("step %d is not kept because its values are suspect, and memory keeps the good step before it; "
                        "mark_good(%d) accepts the values", request.step, request.step)  # fmt: skip
        if save.due is not None and certify(state, save.due):
            drains.certified(save.due.attempt)
        replicas = state.replicas
        is_kept = not save.skipped and not save.is_given_up  # otherwise the trainer may fill its slot again
        if replicas is not None and is_kept and save.slot is not None and request.plan is not None:
            replicas.compare(save.slot, request.plan, request.step)
    except MlflashError as error:
        recorder.failed(request.step, time.perf_counter() - request.begun_s, error)
        raise
    except BaseException as error:
        world.end_if_mpi_failed(error)
        trainer.ended(SaveFailed(f"the courier failed: {text_of(error)}", rank=world.rank, node=world.node_name,
                                 step=request.step))  # fmt: skip
        raise
    finally:
        recorder.seconds["protect and commit"] += time.perf_counter() - start


def _committed(save: Save, state: CourierState, drains: Drains) -> None:
    recorder = state.recorder
    if not save.is_given_up:
        state.unprotected = None  # a newer step has full redundancy
    slot, share = save.slot, save.share
    if save.is_kept and state.config.drains_from_disk and (kept := state.pool.kept_of(save.attempt)):
        slot, share = kept[0], kept[1] if len(kept) > 1 else None
    drains.committed(slot, share, save.drain_asked, save.drains_idle)
    state.pool.saved(save.request.begun_s)
    recorder.holds(state.pool.nbytes)
    recorder.committed(save.request.step, time.perf_counter() - save.request.begun_s, save.attempt.generation)
