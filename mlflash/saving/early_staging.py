"""States that are staged before their step is known: a framework copies first, and plans and saves later."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..errors import MlflashError
from ..memory.own_slots import OwnSlots
from ..memory.slot import Slot
from ..redundancy.deduplication import Piece
from ..redundancy.slot_plan import Plan
from ..state.leaves import Flat
from .staging import Staging, has_room


@dataclasses.dataclass(eq=False)
class StagedState:
    """A state that was staged before its step is known.

    Attributes:
        slot, share: where it is.
        plan: how.
        inode, checks: as in `SaveRequest`.
        given_up: whether the slot was given to other saves.
    """

    slot: Slot
    share: Slot
    plan: Plan
    inode: int
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


class StagedStates:
    """Those of this rank. Not collective.

    Args:
        stage: copies them.
        pool: has the slots.
    """

    def __init__(self, stage: Staging, pool: OwnSlots):
        self._stage, self._pool = stage, pool
        self.all: tuple[StagedState, ...] = ()

    def stage(self, flat: Flat, planned: Plan, timeout_s: float) -> StagedState | None:
        """Stage a state; None where no slots are free in time, or they have to be made first."""
        ahead: StagedState | None = None
        try:
            taken = self._pool.take(timeout_s, flat)
            if taken is None or not has_room(planned, *taken):
                return None
            assert taken[0].segment is not None
            inode = taken[0].segment.inode
            ahead = StagedState(*taken, planned, inode, self._stage.copy(flat, planned, *taken)[0])
            self.all += (ahead,)
        except MlflashError:
            return None
        finally:
            if ahead is None:
                self._pool.give_back(self._pool.taken_by(flat))
        return ahead

    def take(self, ahead: StagedState) -> bool:
        """Leave a state to a save; False where it was given up."""
        known = ahead in self.all
        self.all = tuple(other for other in self.all if other is not ahead)
        return known

    def give_up(self, ahead: StagedState) -> None:
        """Let other saves use the slots of a state."""
        if self.take(ahead):
            ahead.given_up = True
            self._pool.give_back((ahead.slot, ahead.share))

    def give_up_all(self) -> None:
        """Let other saves use all slots."""
        for ahead in self.all:
            self.give_up(ahead)
