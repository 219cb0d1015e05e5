"""The saves of this run: numbered, staged, posted to the courier, and watched until they end.

Every call of `save` posts exactly one job, whatever goes wrong before: the queues of all ranks must match. A save of an
adapter may be staged before its step is known, and a rank may miss one of them: then the next one ends it (`patient`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import numpy as np

from . import commit, restore
from .comm import check_torch_rank
from .config import Config
from .courier import Courier, Job
from .errors import DeadlineExceeded, MlflashError, SaveFailed, StateError, StepOrderError
from .parts import Parts
from .points import reach
from .segment import Segment
from .sharing import Piece
from .slot import Slot
from .snapshot import Snapshot
from .stage import Plan, Stage
from .state import Flat, flatten

log = logging.getLogger("mlflash")


@dataclasses.dataclass(eq=False)
class Ahead:
    """A state that was staged before its step is known.

    Attributes:
        slot, share: where it is.
        plan: how.
        segment, checks: as in `commit.Save`.
        given_up: whether the slot was given to other saves.
    """

    slot: Slot
    share: Slot
    plan: Plan
    segment: Segment | None
    checks: dict[Piece, int]
    given_up: bool = False

    def bytes_of(self, leaf: int) -> np.ndarray | None:
        """The bytes of a leaf; None where they are shared with other ranks, and may be stored there."""
        layout = self.plan.layout
        entry = layout.entries[leaf]
        if layout.is_shared(entry):
            return None
        return self.slot.payload(layout.extents)[entry.start : entry.start + entry.nbytes]

    def write(self, leaf: int, content: bytes) -> bool:
        """Put bytes into a leaf that was staged as blanks; False where it is too small, or the slot was given up."""
        room = self.bytes_of(leaf)
        if room is None or self.given_up or len(content) > room.nbytes:
            return False
        room[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        return True


class Saves:
    """Makes snapshots of states and keeps those that have not ended.

    Args:
        config: when_busy, strict and timeout_s are used here.
        parts: this rank's slots and communicators.
        courier: does everything after staging.
        seconds: seconds per verb, added to.

    Attributes:
        last_step: the newest step saved or restored; the next one must be larger.
        stage: copies states into slots.
    """

    def __init__(self, config: Config, parts: Parts, courier: Courier, seconds: dict[str, float]):
        self._config, self._parts, self._courier, self._seconds = config, parts, courier, seconds
        self._world = parts.world
        self._pending: list[Snapshot] = []
        self._warned_late = False
        self._version = 0  # of what is shared
        self._aheads: list[Ahead] = []
        self._last_again: commit.Save | None = None
        self.last_step: int | None = None
        self.stage = Stage(config.block_nbytes, config.timeout_s)

    def save(self, step: int, state: object) -> Snapshot:
        """Stage a state and post the rest; see `Checkpointer.save`."""
        return self._save(step, lambda save: self._fill(save, flatten(state)))

    def save_again(self, step: int, flat: Flat | Ahead | MlflashError) -> Snapshot:
        """Save a step, which may be the newest one once more; see `Checkpointer.save_again`."""

        def fill(save: commit.Save) -> None:
            if isinstance(flat, MlflashError):
                raise flat
            if isinstance(flat, Ahead):
                if flat not in self._aheads:
                    raise self._failure(save, "what was staged for it was given up")
                self._aheads.remove(flat)
                save.slot, save.share, save.plan = flat.slot, flat.share, flat.plan
                save.segment, save.checks = flat.segment, flat.checks
            else:
                self._fill(save, flat)

        return self._save(step, fill, again=True)

    def withdraw(self) -> None:
        """Make sure that the last save of `save_again`, if it has not ended, never will well. Not collective."""
        save = self._last_again
        if save is not None and not save.snapshot.done:
            save.problem = self._failure(save, "other ranks did not come as far, and this one has begun another save")

    def stage_ahead(self, flat: Flat) -> Ahead | None:
        """Stage a state whose step is not known yet; None where that needs other ranks. Not collective.

        That is so where its slots must be made first, or where what is shared must be agreed on, or where another
        state is staged ahead.
        """
        if self._aheads or not self._is_settled(flat):
            return None
        planned = self.plan(flat)
        taken = self._parts.shelf.take(self._config.timeout_s if self._config.when_busy == "wait" else 0)
        if taken is None:
            return None
        try:
            if not _has_room(planned, *taken):
                raise SaveFailed("the slots have to be made first")
            checks = self.stage.copy(flat, planned, *taken)
        except MlflashError:
            self._parts.shelf.give_back(taken)
            return None
        ahead = Ahead(*taken, planned, taken[0].segment, checks)
        self._aheads.append(ahead)
        return ahead

    def forget(self) -> None:
        """Forget the slots, which are going to be replaced, and what was staged ahead into them. Not collective."""
        for ahead in tuple(self._aheads):
            self.give_up(ahead)
        self.stage.forget()

    def give_up(self, ahead: Ahead) -> None:
        """Let other saves use the slots of a state that was staged ahead. Not collective."""
        if ahead in self._aheads:
            self._aheads.remove(ahead)
            ahead.given_up = True
            self._parts.shelf.give_back((ahead.slot, ahead.share))

    def _save(self, step: int, fill: Callable[[commit.Save], None], again: bool = False) -> Snapshot:
        whole = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
        snapshot = Snapshot(int(step) if whole else -1, lambda: self._courier.late)
        save = commit.Save(snapshot, self._parts.next_attempt(), patient=again)
        mistake: BaseException | None = None
        try:
            self._check_step(int(step) if whole else None, step, again)
            fill(save)
        except (StateError, StepOrderError) as error:
            mistake = save.problem = error
        except MlflashError as error:
            save.problem = error
        except BaseException as error:  # state_dict() of an object may raise anything; the others must not wait for us
            mistake, save.problem = error, StateError(f"the state could not be read: {error!r}")
        if save.problem is not None:
            save.problem.rank, save.problem.node = self._world.rank, self._world.node_name
            snapshot.end(save.problem)  # this rank need not hear from the others to know
        late, refused = lambda error: self._note_late(snapshot, error), lambda error: commit.refuse(save, error)
        self._courier.post(Job(lambda: self._bring_to_end(save), late, refused))
        if save.stage is not None and not again:
            save.staged.wait(self._config.timeout_s)
            if not save.staged.is_set():  # the caller goes on and may change the state: this must not be committed
                save.problem = self._failure(save, "no room was made in time")
        snapshot.reported = mistake is not None
        if again:
            self._last_again = save
        self._pending.append(snapshot)
        snapshot.stalled()
        self._parts.counts["saves"] += 1
        self._parts.counts["bytes staged"] += snapshot.nbytes
        self._seconds["stall"] += snapshot.stall_s
        if mistake is not None:
            raise mistake
        self._look_at_pending()
        return snapshot

    def wait(self) -> None:
        """Wait until every save so far has ended or is late; see `Checkpointer.wait`."""
        for snapshot in self._pending:
            try:
                snapshot.wait()
            except MlflashError:
                pass  # a warning already, or raised below
        self._look_at_pending()

    def _check_step(self, step: int | None, given: object, again: bool) -> None:
        least = 0 if self.last_step is None else self.last_step + (0 if again else 1)
        if step is None or step < least:
            raise StepOrderError(
                "steps must grow from save to save", expected=f"a whole number, {least} or more", found=repr(given)
            )
        self.last_step = step

    def _fill(self, save: commit.Save, flat: Flat) -> None:
        check_torch_rank(self._world)
        settled = self._is_settled(flat)
        if settled:
            save.plan = self.plan(flat)
            save.snapshot.nbytes = save.plan.nbytes
        if self._stuck:
            raise self._failure(save, "an earlier save is still waiting for other ranks")
        taken = self._take_slots(save)
        if taken is None:
            return
        reach("stage.begun")
        save.slot, save.share = taken
        if not settled:
            save.unsettled, save.lay_out = flat, lambda: self.plan(flat)
        if save.plan is not None and _has_room(save.plan, *taken):
            self._stage(save, flat)
        else:
            save.stage = lambda: self._stage(save, flat)

    def plan(self, flat: Flat) -> Plan:
        """Lay a state out, sharing what the ranks have agreed on. Not collective."""
        replicas = self._parts.sharers
        if replicas is None:
            return self.stage.plan(flat)
        return self.stage.plan(flat, replicas.sharing, replicas.is_shared)

    def look_at(self, state: object) -> Flat:
        """Take a state apart, if it is not leaves already, and find out what of it is shared. Collective over comm."""
        error: MlflashError | None = None
        flat: Flat | None = None
        try:
            flat = state if isinstance(state, Flat) else flatten(state)
        except MlflashError as problem:
            error = problem

        def work() -> None:
            self._world.raise_together(error)
            self._parts.find_replicas(flat)
            if (replicas := self._parts.sharers) is not None:
                replicas.settle(flat)

        self._courier.call(work)
        assert flat is not None
        return flat

    def _is_settled(self, flat: Flat) -> bool:
        """Whether the ranks have agreed on what they share of a state like this one."""
        replicas = self._parts.sharers
        if replicas is None:
            return True
        if replicas.version != self._version:
            self._version = replicas.version
            self.stage.replan()
        return self.stage.knows(flat)

    def _stage(self, save: commit.Save, flat: Flat) -> None:
        assert save.slot is not None and save.plan is not None
        save.segment = save.slot.segment
        save.checks = self.stage.copy(flat, save.plan, save.slot, save.share)

    def _take_slots(self, save: commit.Save) -> tuple[Slot, Slot] | None:
        if self._config.when_busy == "skip":
            taken = self._parts.shelf.take(0)
            save.skip = taken is None
            return taken
        # While a heal fails, slots may be held back until it is done; the job of this save tries again.
        end = time.monotonic() + (self._config.timeout_s if self._parts.unhealed is None else 0.0)
        while (taken := self._parts.shelf.take(0.05)) is None:
            if self._stuck or time.monotonic() > end:
                held = "both slots are still busy with earlier saves"
                if self._parts.unhealed is not None:
                    held = "the restored step has no full redundancy yet, and both slots are needed for it"
                raise self._failure(save, held)
        return taken

    @property
    def _stuck(self) -> bool:
        return self._courier.late is not None or self._courier.broken is not None

    def _failure(self, save: commit.Save, why: str) -> SaveFailed:
        return SaveFailed(why, rank=self._world.rank, node=self._world.node_name, step=save.snapshot.step)

    def _bring_to_end(self, save: commit.Save) -> None:
        start = time.perf_counter()
        try:
            if self._parts.unhealed is not None:
                restore.heal_or_remember(self._parts, self._parts.unhealed)
            while not commit.run(save, self._parts):
                pass  # other ranks are still at a step that this one has missed
            if not save.snapshot.skipped:
                self._parts.unhealed = None  # a newer step has its redundancy
            self._compare_replicas(save)
            self._parts.counts["skipped" if save.snapshot.skipped else "committed"] += 1
            self._warned_late = False
        except MlflashError as error:
            self._parts.counts["failed"] += 1
            if self._world.rank == 0 or error.rank == self._world.rank:
                log.warning("step %d was not saved: %s", save.snapshot.step, error)
            raise
        except BaseException as error:
            commit.refuse(save, self._failure(save, f"the courier failed: {error!r}"))
            raise
        finally:
            self._seconds["protect and commit"] += time.perf_counter() - start

    def _compare_replicas(self, save: commit.Save) -> None:
        replicas = self._parts.replicas
        if replicas is not None and not save.snapshot.skipped and save.slot is not None and save.plan is not None:
            replicas.compare(save.slot, save.plan, save.snapshot.step)

    def _note_late(self, snapshot: Snapshot, error: DeadlineExceeded) -> None:
        self._parts.counts["late"] += 1
        snapshot.late(error)
        if not self._warned_late:
            self._warned_late = True
            log.warning("step %d is late, and steps are not saved until it has caught up: %s", snapshot.step, error)

    def _look_at_pending(self) -> None:
        """Forget the snapshots that have ended; with ``strict``, raise what failed, once."""
        wrong = [s for s in self._pending if s.error is not None and not s.reported]
        self._pending = [s for s in self._pending if not s.done]
        for snapshot in wrong:
            snapshot.reported = True
        if wrong and self._config.strict and wrong[0].error is not None:
            raise wrong[0].error


def _has_room(plan: Plan, slot: Slot, share: Slot) -> bool:
    size = plan.share_extents
    return slot.view.nbytes >= plan.layout.extents.nbytes and (size is None or share.view.nbytes >= size.nbytes)
