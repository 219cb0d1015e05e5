"""States that are staged before their step is known: a framework copies first, and plans and saves later."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import DeadlineExceeded, MlflashError, SaveFailed
from ..memory.own_slots import OwnSlots
from ..memory.slot import Slot
from ..redundancy.deduplication import Piece, Plan
from ..state.leaves import Flat
from .deferred_copies import DeferredCopies
from .lazy_saves import LazySaves, Until
from .staging import Staging, has_room


@dataclasses.dataclass(eq=False)
class StagedState:
    """A state that was staged before its step is known."""

    slot: Slot
    share: Slot
    plan: Plan
    inode: int
    checks: dict[Piece, int]
    later: DeferredCopies
    given_up: bool = False  # whether the slot was given to other saves
    maker: int = dataclasses.field(default_factory=os.getpid)

    @property
    def is_lazy(self) -> bool:
        """Whether some of it was not there yet when it was staged: before you read its bytes, call `finish`."""
        return not self.later.is_empty

    def finish(self) -> None:
        """Wait until all of it is there. Raises StateError if the state was changed meanwhile or not copied."""
        self.later.finish()
        if self.later.error is not None:
            raise self.later.error

    def bytes_of(self, leaf: int) -> np.ndarray | None:
        """The bytes of a leaf; None if they are shared with other ranks, which may store them."""
        layout = self.plan.layout
        entry = layout.entries[leaf]
        if layout.is_shared(entry):
            return None
        return self.slot.payload(layout.extents)[entry.start : entry.start + entry.nbytes]

    def write(self, leaf: int, content: bytes) -> bool:
        """Write bytes into a leaf that was staged as blanks; False if it is too small, or if the slot was given up."""
        room = self.bytes_of(leaf)
        if room is None or self.given_up or len(content) > room.nbytes:
            return False
        room[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        return True


class StagedStates:
    """The staged states of this rank."""

    def __init__(self, stage: Staging, pool: OwnSlots, lazy: LazySaves):
        self._stage, self._pool, self._lazy = stage, pool, lazy
        self.all: tuple[StagedState, ...] = ()

    def stage(self, flat: Flat, planned: Plan, timeout_s: float, until: Until | None = None) -> StagedState | None:
        """Stage a state; None if no slots are free in time, or if they have to be made first."""
        ahead: StagedState | None = None
        try:
            taken = self._pool.take(timeout_s, flat)
            if taken is None or not has_room(planned, *taken):
                return None
            assert taken[0].segment is not None
            inode = taken[0].segment.inode
            copied = self._stage.copy(flat, planned, *taken, self._lazy.find(flat, until))
            ahead = StagedState(*taken, planned, inode, *copied)
            self._pool.hand_over(taken, ahead)
            self.all += (ahead,)
            if ahead.is_lazy:
                self._lazy.begin(ahead.later)
                threading.Thread(target=ahead.later.help, name="mlflash-copies", daemon=True).start()
        except MlflashError:
            return None
        finally:
            if ahead is None:
                self._pool.give_back(flat)
        return ahead

    def take(self, ahead: StagedState) -> bool:
        """Leave a state to a save; False if it was given up."""
        known = ahead in self.all
        self.all = tuple(other for other in self.all if other is not ahead)
        return known

    def give_up(self, ahead: StagedState) -> None:
        """Let other saves use the slots of a state."""
        if self.take(ahead):
            ahead.given_up = True
            if ahead.is_lazy and ahead.maker == os.getpid():  # a forked process has nobody that makes these copies
                try:
                    ahead.later.cancel()
                except DeadlineExceeded:
                    pass  # a device still writes: nobody gets that slot
            self._pool.give_back(ahead)


# Saves that all ranks begin before it is known whether they follow: a framework plans first, and may fail. A rank on
# which a save does not follow posts its failure: the jobs of all ranks must match.


log = logging.getLogger("mlflash")


@dataclasses.dataclass(eq=False)
class ReservedSave:
    """A save that was begun on all ranks, and that this rank posts, or fails."""

    step: int
    thread: threading.Thread  # works for it, and has finished with it when it posts it, begins something else, or ends
    staged_states: tuple[StagedState, ...]  # what had been staged ahead when it was begun; nothing else will use it
    came: bool = False  # whether its thread has come back to save it, and will post it


class ReservedSaves:
    """The reserved saves of this rank."""

    def __init__(self, post_failure: Callable[[ReservedSave], None], timeout_s: float):
        self._post_failure, self._timeout_s = post_failure, timeout_s
        self._all: list[ReservedSave] = []
        self._lock = threading.Lock()

    def add(self, step: int, thread: threading.Thread, staged_states: tuple[StagedState, ...]) -> ReservedSave:
        """Announce that a save follows; see `Adapting.begin`."""
        begun = ReservedSave(step, thread, staged_states)
        with self._lock:
            self._all.append(begun)
        return begun

    def end(self, at_once: bool = False) -> None:
        """Post the failure of saves that their thread has left; ``at_once``: also of those whose thread still works."""
        here = threading.current_thread()
        with self._lock:
            waiting = [begun for begun in self._all if not begun.came]
            over = [one for one in waiting if at_once or one.thread is here or not one.thread.is_alive()]
            self._all = [begun for begun in self._all if begun not in over]
        for begun in over:
            if at_once:
                log.warning(
                    "step %d is not saved: the thread that began this save did not come back to it in time", begun.step
                )
            self._post_failure(begun)

    def wait(self) -> None:
        """Wait until all saves, or their failures, are posted; what this thread posts next comes after them."""
        end = time.monotonic() + self._timeout_s
        self.end()
        while self._all:
            time.sleep(1e-3)
            self.end(at_once=time.monotonic() > end)

    @contextlib.contextmanager
    def coming(self, begun: ReservedSave) -> Iterator[None]:
        """Let other threads' posts wait until the block has posted this save. Raises SaveFailed if it was given up."""
        with self._lock:
            if begun not in self._all:
                raise SaveFailed("this save was given up before its thread came back to it", step=begun.step)
            begun.came = True
        try:
            yield
        finally:
            with self._lock:
                self._all.remove(begun)
