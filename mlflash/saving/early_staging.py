"""States that are staged before their step is known: a framework copies first, and plans and saves later."""

from __future__ import annotations

import dataclasses
import os
import threading

import numpy as np

from ..errors import DeadlineExceeded, MlflashError
from ..memory.own_slots import OwnSlots
from ..memory.slot import Slot
from ..redundancy.deduplication import Piece
from ..redundancy.slot_plan import Plan
from ..state.leaves import Flat
from .deferred_copies import DeferredCopies
from .lazy_leaves import Until
from .lazy_saves import LazySaves
from .staging import Staging, has_room


@dataclasses.dataclass(eq=False)
class StagedState:
    """A state that was staged before its step is known.

    Attributes:
        given_up: whether the slot was given to other saves.
    """

    slot: Slot
    share: Slot
    plan: Plan
    inode: int
    checks: dict[Piece, int]
    later: DeferredCopies
    given_up: bool = False
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
            self.all += (ahead,)
            if ahead.is_lazy:
                self._lazy.begin(ahead.later)
                threading.Thread(target=ahead.later.help, name="mlflash-copies", daemon=True).start()
        except MlflashError:
            return None
        finally:
            if ahead is None:
                self._pool.give_back(self._pool.taken_by(flat))
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
            self._pool.give_back((ahead.slot, ahead.share))

    def give_up_all(self) -> None:
        """Let other saves use all slots."""
        for ahead in self.all:
            self.give_up(ahead)
