"""The saves of this run: numbered, staged, posted to the courier, and watched until they end.

Every call of `save` posts exactly one job, whatever goes wrong before: the queues of all ranks must match. A save of an
adapter may be staged before its step is known; and it is begun before it is known whether it comes (`Begun`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import numpy as np

from . import commit, restore
from .aheads import Ahead, Aheads
from .comm import check_torch_rank
from .config import Config
from .courier import Courier, Job
from .drains import Drains
from .errors import DeadlineExceeded, MlflashError, SaveFailed, StateError, StepOrderError
from .flatten import Flattener
from .lazy import Steps, Unchanging
from .parts import Parts
from .points import reach
from .slot import Slot
from .snapshot import Snapshot
from .stage import Plan, Stage, has_room
from .state import Flat


@dataclasses.dataclass(eq=False)
class Begun:
    """A save that was begun on all ranks, and that this rank posts, or fails to come to.

    Attributes:
        step: of it.
        thread: works for it, and is through with it when it posts it, begins something else, or ends.
        aheads: what had been staged ahead when it was begun; nobody else comes for it any more.
    """

    step: int
    thread: threading.Thread
    aheads: tuple[Ahead, ...]


class Saves:
    """Makes snapshots of states and keeps those that have not ended.

    Args:
        config: when_busy, strict and timeout_s are used here.
        parts: this rank's slots and communicators.
        courier: does everything after staging.
        drains: told what was committed.

    Attributes:
        last_step: the newest step saved or restored; the next one must be larger.
        stage: copies states into slots.
        aheads: states that were staged before their step was known.
    """

    def __init__(self, config: Config, parts: Parts, courier: Courier, drains: Drains):
        self._config, self._parts, self._courier, self._drains = config, parts, courier, drains
        self._world, self._journal = parts.world, parts.journal
        self._pending: list[Snapshot] = []
        self._version = 0  # of what is shared
        self._begun: list[Begun] = []
        self._begun_lock = threading.Lock()
        self.last_step: int | None = None
        self._flattener = Flattener()
        self._unchanging, self._steps = Unchanging(), Steps()
        if config.max_slowdown:
            self._steps.tell(parts.pace.step)
        self.stage = Stage(config.block_nbytes, parts.crew, config.timeout_s)
        self.aheads = Aheads(self.stage, parts.shelf)

    def save(self, step: int, state: object, until: object = None) -> Snapshot:
        """Stage a state and post the rest; see `Checkpointer.save`."""
        self.await_begun()
        return self._save(step, lambda save: self._fill(save, self._flattener.flatten(state), until))

    def begin(self, step: int, thread: threading.Thread) -> Begun:
        """Say that a save comes; see `Adapting.begin`."""
        self.end_begun()
        begun = Begun(step, thread, self.aheads.all)
        with self._begun_lock:
            self._begun.append(begun)
        self.last_step = step if self.last_step is None else max(step, self.last_step)
        return begun

    def end_begun(self) -> None:
        """Post the failure of the saves whose thread is through with them: other ranks may have posted theirs.

        Not collective.
        """
        here = threading.current_thread()
        with self._begun_lock:
            over = [b for b in self._begun if b.thread is here or not b.thread.is_alive()]
            self._begun = [begun for begun in self._begun if begun not in over]
        for begun in over:
            for ahead in begun.aheads:
                self.aheads.give_up(ahead)
            try:
                self._save(begun.step, _fail, again=True)
            except MlflashError:
                pass  # it says that of the step, too

    def await_begun(self) -> None:
        """Wait until this rank has posted the saves that were begun, or their failure. Not collective.

        Raises:
            DeadlineExceeded: the thread of one is still at it.
        """
        end = time.monotonic() + self._config.timeout_s
        self.end_begun()
        while self._begun:
            if time.monotonic() > end:
                raise DeadlineExceeded("a save of another thread was begun and has not come so far that it is posted",
                                       rank=self._world.rank, step=self._begun[0].step)  # fmt: skip
            time.sleep(1e-3)
            self.end_begun()

    def save_again(self, flat: Flat | Ahead | MlflashError, begun: Begun) -> Snapshot:
        """Save what was begun, which may be the newest one once more; see `Adapting.save_again`."""
        with self._begun_lock:
            if begun not in self._begun:
                raise SaveFailed("it was given up before it came", rank=self._world.rank, step=begun.step)
            self._begun.remove(begun)
        for ahead in begun.aheads:
            if ahead is not flat:
                self.aheads.give_up(ahead)

        def fill(save: commit.Save) -> None:
            if isinstance(flat, MlflashError):
                raise flat
            if isinstance(flat, Ahead):
                if not self.aheads.take(flat):
                    raise self._failure(save, "what was staged for it was given up")
                save.slot, save.share, save.plan = flat.slot, flat.share, flat.plan
                save.segment, save.checks = flat.segment, flat.checks
            else:
                self._fill(save, flat)

        return self._save(begun.step, fill, again=True)

    def stage_ahead(self, flat: Flat) -> Ahead | None:
        """Stage a state whose step is not known yet; None where that needs other ranks. Not collective.

        That is so where its slots must be made first, or where what is shared must be agreed on, or where another
        state is staged ahead.
        """
        if self.aheads.all or not self._is_settled(flat):
            return None
        return self.aheads.stage(
            flat, self.plan(flat), self._config.timeout_s if self._config.when_busy == "wait" else 0
        )

    def forget(self) -> None:
        """Forget the slots, which are going to be replaced, and what was staged ahead into them. Not collective."""
        self.aheads.give_up_all()
        self.stage.forget()

    def end(self) -> None:
        """Let slots and optimizers be: nothing is saved any more. Not collective."""
        self.stage.forget()
        self._steps.close()

    def _save(self, step: int, fill: Callable[[commit.Save], None], again: bool = False) -> Snapshot:
        whole = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
        snapshot = Snapshot(int(step) if whole else -1, lambda: self._courier.late)
        save = commit.Save(snapshot, self._parts.next_attempt())
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
        self._journal.posting(snapshot.step)
        self._courier.post(Job(lambda: self._bring_to_end(save), late, refused))
        if save.stage is not None and not again:
            save.staged.wait(self._config.timeout_s)
            if not save.staged.is_set():  # the caller goes on and may change the state: this must not be committed
                save.problem = self._failure(save, "no room was made in time")
        snapshot.reported = mistake is not None or again  # what waits for it tells all ranks
        self._pending.append(snapshot)
        snapshot.stalled()
        if not again:  # that may be another thread than training's
            self._parts.pace.stalled(snapshot.stall_s)
        staged = save.slot is not None and save.problem is None
        self._journal.saved(snapshot.step, snapshot.stall_s, snapshot.nbytes, snapshot.later is not None, staged)
        if mistake is not None:
            raise mistake
        self._look_at_pending()
        return snapshot

    def wait(self) -> None:
        """Wait until every save so far has ended or is late; see `Checkpointer.wait`."""
        self.await_begun()
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

    def _fill(self, save: commit.Save, flat: Flat, until: object = None) -> None:
        check_torch_rank(self._world)
        lazy = frozenset[int]() if until is None else self._unchanging.find(flat, until)
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
        if save.plan is not None and has_room(save.plan, *taken):
            self._stage(save, flat, lazy)
        else:
            save.stage = lambda: self._stage(save, flat)

    def plan(self, flat: Flat) -> Plan:
        """Lay a state out, sharing what the ranks have agreed on. Not collective."""
        replicas = self._parts.sharers
        if replicas is None:
            return self.stage.plan(flat)
        return self.stage.plan(flat, replicas.sharing, replicas.is_shared)

    def prepare(self, state: object) -> None:
        """Make the slots for a state like this one; see `Checkpointer.prepare`."""
        self.wait()
        flat = self._look_at(state)
        planned = self.plan(flat)
        self.stage.replan()  # what is shared is settled once more by the first save
        size = planned.share_extents
        self.reserve(planned.layout.extents.nbytes, 0 if size is None else size.nbytes)
        if flat.is_on_device:
            self._parts.shelf.pin_own()

    def reserve(self, nbytes: int, share_nbytes: int = 0) -> None:
        """Make slots of at least so many bytes. Collective over comm.

        Raises:
            MemoryTooSmall: they do not fit into the node's memory.
        """
        parts = self._parts

        def work() -> None:
            sizes = parts.protection.inbox_nbytes(self._world.gather(nbytes))
            demand = [(slot, nbytes) for slot in parts.shelf.own]
            demand += [(slot, share_nbytes) for slot in parts.shelf.shares if share_nbytes]
            demand += [(slot, sizes[owner]) for owner, pair in parts.shelf.inbox.items() for slot in pair]
            if not parts.looked and self.last_step is None:  # the newest may be damaged, and an older one be needed
                demand = [(slot, size) for slot, size in demand if slot.header is None]
            parts.make_room(demand, pairs=False)

        self.wait()
        self._courier.call(work)

    def _look_at(self, state: object) -> Flat:
        """Take a state apart, if it is not leaves already, and find out what of it is shared. Collective over comm."""
        error: MlflashError | None = None
        flat: Flat | None = None
        try:
            flat = state if isinstance(state, Flat) else self._flattener.flatten(state)
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

    def _stage(self, save: commit.Save, flat: Flat, lazy: frozenset[int] = frozenset()) -> None:
        assert save.slot is not None and save.plan is not None
        save.segment = save.slot.segment
        save.checks, later = self.stage.copy(flat, save.plan, save.slot, save.share, lazy)
        if not later.is_empty:
            save.later = save.snapshot.later = later
            self._steps.before_next(later)

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
            save.drains_idle, save.drain_asked = self._drains.idle, self._drains.asked
            commit.run(save, self._parts, lambda: self._committed(save))
            self._compare_replicas(save)
            self._journal.ended(save.snapshot.step, save.snapshot.skipped)
        except MlflashError as error:
            self._journal.failed(save.snapshot.step, error)
            raise
        except BaseException as error:
            commit.refuse(save, self._failure(save, f"the courier failed: {error!r}"))
            raise
        finally:
            self._journal.seconds["protect and commit"] += time.perf_counter() - start

    def _committed(self, save: commit.Save) -> None:
        self._parts.unhealed = None  # a newer step has its redundancy
        self._drains.committed(save)
        self._journal.holds(self._parts.shelf.nbytes)
        self._journal.committed(save.snapshot.step, save.snapshot.age_s, save.attempt.generation)

    def _compare_replicas(self, save: commit.Save) -> None:
        replicas = self._parts.replicas
        if replicas is not None and not save.snapshot.skipped and save.slot is not None and save.plan is not None:
            replicas.compare(save.slot, save.plan, save.snapshot.step)

    def _note_late(self, snapshot: Snapshot, error: DeadlineExceeded) -> None:
        snapshot.late(error)
        self._journal.late(snapshot.step, error)

    def _look_at_pending(self) -> None:
        """Forget the snapshots that have ended; with ``strict``, raise what failed, once."""
        wrong = [s for s in self._pending if s.error is not None and not s.reported]
        self._pending = [s for s in self._pending if not s.done]
        for snapshot in wrong:
            snapshot.reported = True
        if wrong and self._config.strict and wrong[0].error is not None:
            raise wrong[0].error


def _fail(save: commit.Save) -> None:
    raise SaveFailed("it failed on some rank before it came to storage", step=save.snapshot.step)
