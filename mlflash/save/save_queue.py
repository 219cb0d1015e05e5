"""The saves of this run: numbered, staged, posted to the courier, and watched until they end.

Every call of `save` posts exactly one job, whatever goes wrong before: the queues of all ranks must match. An exception
may come at any moment, because some signal handlers raise. So a save counts as failed until it is staged, and is posted
in a ``finally``. A save of an adapter may be staged before its step is known, and it is begun before it is known
whether it follows (`ReservedSave`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..channel.client import TrainerState
from ..channel.ranks import Ranks, check_torch_rank
from ..channel.records import SaveRequest
from ..crash_points import reach
from ..errors import (
    DeadlineExceeded,
    MlflashError,
    SaveFailed,
    StateError,
    StepOrderError,
    StructureMismatch,
    SuspectState,
    text_of,
)
from ..events import Event
from ..memory.own_slots import OwnSlots, SlotFile
from ..memory.slot import Slot
from ..protect.deduplication import Piece, Plan, ShareableLeaf, digests, replica_nbytes, shareable
from ..state.flatten import Flattener, flatten_or_none
from ..state.leaves import Flat
from .deferred_copies import Computed, DeferredCopies
from .lazy_saves import LazySaves, Until
from .snapshot import Snapshot
from .stage import NOTHING, StagedState, StagedStates, Staging, copy_to_host, has_room

log = logging.getLogger("mlflash")

_MAX_STEP = (1 << 63) - 1
_LEFT = "an exception, such as one of a signal handler, interrupted the copy of the state"


class SaveQueue:
    """Makes snapshots of states and keeps those that have not ended."""

    def __init__(self, trainer: TrainerState):
        config = trainer.config
        self._trainer, self._config, self._courier, self._slots = trainer, config, trainer.courier, trainer.slots
        self._ranks, self._recorder = trainer.ranks, trainer.recorder
        self._pending: list[Snapshot] = []
        self._version = 0  # version of what ranks share
        self._growing: PendingSave | None = None  # the newest save whose slots are made larger
        self.reservations = ReservedSaves(self._post_failure, config.timeout_s)
        self.last_step: int | None = None  # the newest step saved or restored; the next one must be larger
        self.undefined = ""  # why the state is undefined: a restore failed after it had changed some of it
        self.after_save: Callable[[Snapshot], None] = lambda snapshot: None  # called at the end of each `save`
        self._flattener = Flattener()
        self.lazy = LazySaves(config.lazy, speaks=trainer.ranks.rank == 0)
        self.stage = Staging(trainer.copy_threads, config.timeout_s, trainer.provenance)
        self.staged_states = StagedStates(self.stage, self._slots, self.lazy)

    def save(self, step: int, state: object, until: object = None) -> Snapshot:
        """Stage a state and post the rest; see `Checkpointer.save`."""
        self.reservations.wait()
        snapshot = self._save(step, lambda save: self._fill_from(save, state, until))
        self.after_save(snapshot)
        return snapshot

    def save_flat(self, step: int, flat: Flat, lazy: Mapping[int, Any] | None) -> Snapshot:
        """Stage a state that was taken apart, and post the rest; ``lazy``: what of it is copied later, see `_fill`."""
        return self._save(step, lambda save: self._fill(save, flat, lazy))

    def fail(self, step: int, why: MlflashError) -> Snapshot:
        """Let a save fail on all ranks, because this rank cannot save what they save."""

        def fill(save: PendingSave) -> None:
            raise why

        return self._save(step, fill)

    def begin(self, step: int, thread: threading.Thread) -> ReservedSave:
        """Announce that a save follows; see `AdapterAPI.begin`."""
        self.reservations.end()
        reservation = self.reservations.add(step, thread, self.staged_states.all)
        self.last_step = step if self.last_step is None else max(step, self.last_step)
        return reservation

    def _post_failure(self, reservation: ReservedSave) -> None:
        """Post the failure of a save that does not follow: other ranks may have posted theirs."""
        for early in reservation.staged_states:
            self.staged_states.give_up(early)
        try:
            self._save(reservation.step, _fail, is_reserved=True)
        except MlflashError:
            pass  # the failure was reported for this step

    def save_again(self, flat: Flat | StagedState | MlflashError, reservation: ReservedSave) -> Snapshot:
        """Save what was begun, which may be the newest one once more; see `AdapterAPI.save_again`."""

        def fill(save: PendingSave) -> None:
            if isinstance(flat, MlflashError):
                raise flat
            if isinstance(flat, StagedState):
                if not self.staged_states.take(flat):
                    raise self._failure(save, "the copy that was staged for this save was given up")
                save.take_over(flat.slot, flat.share, flat.plan, flat.inode)
                save.request.checks, save.snapshot.nbytes = flat.checks, flat.plan.nbytes
                save.defer(flat.later)
            else:
                self._fill(save, flat)

        with self.reservations.claimed(reservation):
            for early in reservation.staged_states:
                if early is not flat:
                    self.staged_states.give_up(early)
            return self._save(reservation.step, fill, is_reserved=True)

    def stage_early(self, flat: Flat, until: Until | None = None) -> StagedState | None:
        """Stage a state whose step is not known yet; None if that needs other ranks.

        That is the case if its slots must be made first, if the ranks must agree on what is shared, or if another state
        is staged early.
        """
        if self.staged_states.all or not self._is_settled(flat) or self._is_growing:
            return None
        timeout_s = self._config.timeout_s if self._config.when_busy == "wait" else 0
        return self.staged_states.stage(flat, self.plan(flat), timeout_s, until)

    def forget(self) -> None:
        """Forget the slots, which will be replaced, and what was staged early into them."""
        for early in self.staged_states.all:
            self.staged_states.give_up(early)
        self.stage.forget()

    def end(self) -> None:
        """Release slots and optimizers: nothing is saved any more."""
        self.stage.forget()
        self.lazy.steps.close()

    def _save(self, step: int, fill: Callable[[PendingSave], None], is_reserved: bool = False) -> Snapshot:
        is_integer = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
        number = int(step) if is_integer and 0 <= int(step) <= _MAX_STEP else None
        snapshot = Snapshot(-1 if number is None else number, lambda: self._courier.late)
        save = PendingSave(snapshot, self._slots, self._ranks)
        request = save.request
        late, refused = lambda error: self._note_late(snapshot, error), lambda error: save.ended(error)
        job = self._courier.job("commit", request, answers=save, on_late=late, on_refused=refused)
        mistake: BaseException | None = None
        try:
            mistake = self._filled(save, lambda: self._check_step(number, step, is_reserved), fill)
            self._recorder.posting(snapshot.step)
            self._courier.post(job)
            self._courier.wait_sent(job)
            must_wait = request.waits_for_room and not is_reserved and not save.is_copied
            if must_wait and not save.released.wait(self._config.timeout_s):
                save.why_left = "the slots were not made larger in time"
        except BaseException:
            save.why_left = _LEFT
            self._courier.post(job)  # in case it was not posted; twice has no effect
            raise
        finally:
            self._pending.append(snapshot)
        snapshot.reported = mistake is not None or is_reserved  # a caller that waits for it tells all ranks
        snapshot.stall_s = snapshot.age_s
        is_filled = request.lease > 0 and request.problem is None
        self._recorder.saved(snapshot.step, snapshot.stall_s, snapshot.nbytes, snapshot.later is not None, is_filled)
        if mistake is not None:
            raise mistake
        if not is_reserved:
            self.raise_what_failed()
        return snapshot

    def _filled(self, save: PendingSave, check: Callable[[], None], fill: Callable[[PendingSave], None]
                ) -> BaseException | None:  # fmt: skip
        """Fill a save, or note why it is posted as a failure; return what the caller must raise then."""
        try:
            check()
            if self.undefined:
                raise StateError("the state is undefined because a restore of it failed, so it is not saved: "
                                 "restore again, or begin anew", found=self.undefined)  # fmt: skip
            fill(save)
            save.request.filled_s = time.perf_counter()
            save.request.problem = None  # from here on it may be committed
        except BaseException as error:  # state_dict() may raise anything; no rank must wait for us
            return self._give_up(save, error)
        return None

    def _give_up(self, save: PendingSave, error: BaseException) -> BaseException | None:
        """Note why a save is posted as a failure; return what the caller must raise now."""
        problem = error if isinstance(error, MlflashError) else _unreadable(text_of(error))
        problem.rank, problem.node = self._ranks.rank, self._ranks.node_name
        save.request.problem = problem
        save.snapshot.end(problem)  # this rank knows the result already
        return error if error is not problem or isinstance(error, (StateError, StepOrderError)) else None

    def wait(self) -> None:
        """Wait until every save so far has ended or is late; see `Checkpointer.wait`."""
        self.settle()
        self.raise_what_failed()

    def settle(self) -> None:
        """Wait as `wait` does, but raise nothing: collective calls begin with this, on all ranks."""
        self.reservations.wait()
        for snapshot in self._pending:
            try:
                snapshot.wait()
            except MlflashError:
                pass  # it was logged, or the next save, wait or close raises it

    def _check_step(self, step: int | None, given: object, is_reserved: bool) -> None:
        least = 0 if self.last_step is None else self.last_step + (0 if is_reserved else 1)
        if step is None or step < least:
            raise StepOrderError(
                "steps must grow from save to save",
                expected=f"a whole number, {least} or more, at most 2**63 - 1",
                found=repr(given),
            )
        self.last_step = step

    def _fill_from(self, save: PendingSave, state: object, until: object) -> None:
        flat = self._flattener.flatten(state)
        self._fill(save, flat, None if until is None else self.lazy.find(flat, until))

    def _fill(self, save: PendingSave, flat: Flat, lazy: Mapping[int, Any] | None = None) -> None:
        """Stage a state; ``lazy``: what of it is copied later; None: training must not go on before it is copied."""
        check_torch_rank(self._ranks.rank, self._ranks.size, self._ranks.torch_group)
        request = save.request
        if self._is_growing and self._config.when_busy == "skip":
            request.skip = True
            return
        if self._growing is not None and not self._growing.released.wait(self._config.timeout_s):
            raise self._failure(save, "an earlier save is still being staged")
        settled = self._is_settled(flat)
        if settled:
            self._lay_out(save, flat)
        self._refuse_if_stuck(save)
        if self._slots.is_device_stuck:
            raise self._failure(save, "a device has not finished its copies for an earlier save")
        taken = self._take_slots(save)
        if taken is None:
            return
        reach("stage.begun")
        request.lease = taken[0].lease
        if request.plan is not None and has_room(request.plan, *taken):
            request.inode, request.checks = self._stage(save, flat, taken, lazy or NOTHING)
            return
        for number, leaf in (lazy or NOTHING).items():
            if isinstance(leaf, Computed):  # it is copied with the others now
                flat.values[number] = leaf.value()
        request.waits_for_room, self._growing = True, save
        # A save without until= returns when the courier has everything. The courier then commits it even without the
        # trainer.
        if lazy is not None and self._config.lazy and (copied := self._copy_to_host(flat)) is not None:
            flat, save.is_copied = copied, True
        if not settled:
            request.is_unsettled = True
            save.flat, save.plan_now = flat, lambda: self._lay_out(save, flat)
        save.stage_now = lambda: self._stage(save, flat, taken)

    def _copy_to_host(self, flat: Flat) -> Flat | None:
        config, neighbours = self._config, self._ranks.topology.ranks_on[self._ranks.node_index]
        threads = self._trainer.copy_threads
        return copy_to_host(flat, config.slots_per_state, config.memory, len(neighbours), threads)

    @property
    def _is_growing(self) -> bool:
        """Whether the slots of an earlier save are made larger, or are filled then."""
        return self._growing is not None and not self._growing.released.is_set()

    def _lay_out(self, save: PendingSave, flat: Flat) -> Plan:
        planned = save.request.plan = self.plan(flat)
        save.snapshot.nbytes = planned.nbytes
        return planned

    def plan(self, flat: Flat) -> Plan:
        """Lay a state out, sharing what the ranks have agreed on."""
        trainer = self._trainer
        if trainer.sharing.sharing is None:
            return self.stage.plan(flat)
        return self.stage.plan(flat, trainer.sharing.sharing, trainer.is_shared)

    def prepare(self, state: object) -> None:
        """Make the slots for a state like this one; see `Checkpointer.prepare`."""
        self.settle()
        flat = self._flatten_settled(state)
        planned = self._ranks.together(lambda: self.plan(flat), _unreadable)
        self.stage.replan()  # the first save settles once more what is shared
        size = planned.share_extents
        self.reserve(planned.layout.extents.nbytes, 0 if size is None else size.nbytes)
        if flat.is_on_device:
            self._slots.pin()

    def reserve(self, nbytes: int, share_nbytes: int = 0) -> None:
        """Make slots of at least so many bytes. Collective over comm. Raises MemoryTooSmall if they do not fit."""
        self.settle()
        self._courier.call("reserve", nbytes, share_nbytes, self.last_step is None)

    def _flatten_settled(self, state: object) -> Flat:
        """Take a state apart, unless it is leaves already, and find out what of it is shared. Collective over comm."""

        def flatten() -> tuple[Flat, dict[tuple[int, ...], int]]:
            flat = state if isinstance(state, Flat) else self._flattener.flatten(state)
            return flat, replica_nbytes(flat, self._ranks.from_torch)

        flat, held = self._ranks.together(flatten, _unreadable)
        self._courier.call("settle_shared", held, answers=LiveState(flat, self._ranks))
        return flat

    def find_replicas(self, state: object) -> None:
        """Find out which ranks hold the same parts of a state, if the state says so. Collective over the world."""

        def held() -> dict[tuple[int, ...], int]:
            flat = flatten_or_none(state) if "torch.distributed.tensor" in sys.modules else None
            return replica_nbytes(flat, self._ranks.from_torch)

        unreadable = lambda why: StructureMismatch(f"the state could not be read: {why}")
        self._ranks.together_then(held, unreadable, "find_replicas")

    def _is_settled(self, flat: Flat) -> bool:
        """Whether the ranks have agreed on what they share in a state like this one."""
        sharing = self._trainer.sharing
        if sharing.sharing is None:
            return True
        if sharing.version != self._version:
            self._version = sharing.version
            self.stage.replan()
        return self.stage.knows(flat)

    def _stage(self, save: PendingSave, flat: Flat, taken: tuple[Slot, Slot], lazy: Mapping[int, Any] = NOTHING
               ) -> tuple[int, dict[Piece, int]]:  # fmt: skip
        slot, share = taken
        assert save.request.plan is not None and slot.segment is not None
        inode = slot.segment.inode
        checks, later = self.stage.copy(flat, save.request.plan, slot, share, lazy)
        save.defer(later)
        if later is not None:
            self.lazy.begin(later)
        return inode, checks

    def _take_slots(self, save: PendingSave) -> tuple[Slot, Slot] | None:
        request = save.request
        if self._config.when_busy == "skip":
            taken = self._slots.take(0, request)
            request.skip = taken is None
            return taken
        # Do not wait for slots that are held back until the restored step is protected: this save's job tries that.
        end = time.monotonic() + (0.0 if self._trainer.is_unprotected else self._config.timeout_s)
        while (taken := self._slots.take(0.05, request)) is None:
            self._refuse_if_stuck(save)
            if time.monotonic() > end:
                held = "all slots are still busy with earlier saves"
                if self._trainer.is_unprotected:
                    held = "the restored step has no full redundancy yet, and all slots are needed for it"
                raise self._failure(save, held)
        return taken

    def _refuse_if_stuck(self, save: PendingSave) -> None:
        if self._courier.broken is not None:
            raise self._failure(
                save, f"nothing is saved any more after an earlier error: {text_of(self._courier.broken)}"
            )
        if self._courier.late is not None:
            raise self._failure(save, "an earlier save is still waiting for other ranks")

    def _failure(self, save: PendingSave, why: str) -> SaveFailed:
        return SaveFailed(why, rank=self._ranks.rank, node=self._ranks.node_name, step=save.request.step)

    def _note_late(self, snapshot: Snapshot, error: DeadlineExceeded) -> None:
        snapshot.late(error)
        self._recorder.late(snapshot.step, error)

    def raise_what_failed(self) -> None:
        """Forget the snapshots that have ended; with ``strict``, raise their errors, each once."""
        wrong = [s for s in self._pending if s.error is not None and not s.reported]
        if any(s.done and (s.error is None or s.skipped) for s in self._pending):
            self._recorder.caught_up()
        self._pending = [s for s in self._pending if not s.done]
        for snapshot in wrong:
            snapshot.reported = True
        errors = [s.error for s in wrong if self._config.strict or isinstance(s.error, SuspectState)]
        if errors and errors[0] is not None:
            raise errors[0]


def _unreadable(why: str) -> StateError:
    return StateError(f"the state could not be read: {why}")


def _fail(save: PendingSave) -> None:
    raise SaveFailed("the save failed on some rank before anything was stored", step=save.request.step)


@dataclasses.dataclass(eq=False)
class LiveState:
    """Answers the courier's questions about a state that ranks may share: see `deduplication.Shareable`."""

    flat: Flat | None
    ranks: Ranks

    def shareable(self) -> list[ShareableLeaf]:
        return [] if self.flat is None else shareable(self.flat, self.ranks.from_torch)

    def digests(self, keys: Collection[int]) -> dict[int, int]:
        return {} if self.flat is None else digests(self.flat, keys)


class PendingSave(LiveState):
    """Answers the courier's questions during a save: see `records.Trainer`."""

    def __init__(self, snapshot: Snapshot, slots: OwnSlots, ranks: Ranks):
        super().__init__(None, ranks)
        self.request, self.snapshot, self._slots = SaveRequest(snapshot.step), snapshot, slots
        self.plan_now: Callable[[], Plan] | None = None
        # fills the slots; returns the inode and the checksums of the request
        self.stage_now: Callable[[], tuple[int, dict[Piece, int]]] | None = None
        # whether the state is already in memory of its own, so that training continues before it is in the slots
        self.is_copied = False
        self.later: DeferredCopies | None = None
        # why the main thread continues although the slots may not be filled yet, and may change the state: for example
        # an exception of a signal handler
        self.why_left = ""
        # set when training may go on: the courier has filled slots, or the save cannot be staged, or has ended
        self.released = Event()

    def take_over(self, slot: Slot, share: Slot, plan: Plan, inode: int) -> None:
        """Save what is in own slots that were filled for something else."""
        self._slots.hand_over((slot, share), self.request)
        self.request.lease, self.request.plan, self.request.inode = slot.lease, plan, inode

    def defer(self, later: DeferredCopies | None) -> None:
        """Make the courier wait for what is copied after `save` has returned; None: nothing is."""
        self.later = self.snapshot.later = later
        self.request.has_deferred = later is not None

    def lay_out(self) -> Plan:
        assert self.plan_now is not None
        return self.plan_now()

    def stage(self, files: Sequence[SlotFile]) -> tuple[int, dict[Piece, int], bool]:
        try:
            self._refuse_left()
            self._slots.update(files)
            assert self.stage_now is not None
            staged = self.stage_now()
            self._refuse_left()
            return (*staged, self.later is not None)
        except BaseException:
            self.released.set()
            raise

    def handed_over(self) -> None:
        self.released.set()

    def _refuse_left(self) -> None:
        if self.why_left:
            raise SaveFailed(self.why_left)

    def begin_deferred(self) -> None:
        if self.later is not None:
            self.later.help()

    def finish_deferred(self) -> tuple[MlflashError | None, dict[Piece, int]]:
        if self.later is None:
            return None, {}
        self.later.finish()
        return self.later.error, self.request.checks

    def is_changed(self) -> MlflashError | None:
        if self.later is None:
            return None
        self.later.check_unchanged()
        return self.later.error

    def cancel_deferred(self) -> None:
        if self.later is not None:
            self.later.cancel()

    def ended(self, error: MlflashError | None, skipped: bool = False, at: float | None = None) -> None:
        self.flat = self.plan_now = self.stage_now = None  # these refer to the live state
        if self.request.lease:  # the courier knows it, and has ended it
            self._slots.ended(self.request)
        else:
            self._slots.give_back(self.request)
        self.snapshot.skipped = skipped
        self.snapshot.end(error, at)
        self.released.set()


# Saves that all ranks begin before it is known whether they follow: a framework plans first, and may fail. A rank on
# which a save does not follow posts its failure: the jobs of all ranks must match.


@dataclasses.dataclass(eq=False)
class ReservedSave:
    """A save that was begun on all ranks, and that this rank posts, or fails."""

    step: int
    thread: threading.Thread  # works for it, and has finished with it when it posts it, begins something else, or ends
    staged_states: tuple[StagedState, ...]  # what had been staged early when it was begun; nothing else will use it
    is_claimed: bool = False  # whether its thread has come back to save it, and will post it


class ReservedSaves:
    """The reserved saves of this rank."""

    def __init__(self, post_failure: Callable[[ReservedSave], None], timeout_s: float):
        self._post_failure, self._timeout_s = post_failure, timeout_s
        self._all: list[ReservedSave] = []
        self._lock = threading.Lock()

    def add(self, step: int, thread: threading.Thread, staged_states: tuple[StagedState, ...]) -> ReservedSave:
        """Announce that a save follows; see `AdapterAPI.begin`."""
        reservation = ReservedSave(step, thread, staged_states)
        with self._lock:
            self._all.append(reservation)
        return reservation

    def end(self, at_once: bool = False) -> None:
        """Post the failure of saves that their thread has left; ``at_once``: also of those whose thread still works."""
        current = threading.current_thread()
        with self._lock:
            waiting = [save for save in self._all if not save.is_claimed]
            over = [save for save in waiting if at_once or save.thread is current or not save.thread.is_alive()]
            self._all = [save for save in self._all if save not in over]
        for reservation in over:
            if at_once:
                log.warning(
                    "step %d is not saved: the thread that began this save did not come back to it in time",
                    reservation.step,
                )
            self._post_failure(reservation)

    def wait(self) -> None:
        """Wait until all saves, or their failures, are posted; what this thread posts next comes after them."""
        end = time.monotonic() + self._timeout_s
        self.end()
        while self._all:
            time.sleep(1e-3)
            self.end(at_once=time.monotonic() > end)

    @contextlib.contextmanager
    def claimed(self, reservation: ReservedSave) -> Iterator[None]:
        """Let other threads' posts wait until the block has posted this save. Raises SaveFailed if it was given up."""
        with self._lock:
            if reservation not in self._all:
                raise SaveFailed("this save was given up before its thread came back to it", step=reservation.step)
            reservation.is_claimed = True
        try:
            yield
        finally:
            with self._lock:
                self._all.remove(reservation)
