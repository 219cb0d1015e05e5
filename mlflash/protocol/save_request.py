"""What a trainer asks of its courier when it saves, as plain data; and what the courier asks the trainer meanwhile."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

from ..errors import MlflashError, SaveFailed
from ..memory.own_slots import SlotId
from ..redundancy.deduplication import Piece
from ..redundancy.shareable_leaves import Shareable
from ..redundancy.slot_plan import Plan


@dataclasses.dataclass(eq=False)
class SaveRequest:
    """One save, as the trainer has staged it, or could not.

    Attributes:
        step: the training step.
        problem: why this rank cannot take part; it then only sends a failed receipt. That is so from the start: a save
            that an exception leaves before it is staged must not look as if it was.
        skip: this rank's slots are busy, and the save is to be skipped on all ranks.
        slot, share: numbers of the own slots that the state is staged into; the second gets this rank's share of what
            several ranks hold alike.
        files: inodes of the files that the trainer has mapped of the two; 0: none.
        inode: of the file of the slot that was staged into; 0: it is not staged yet.
        plan: where the state goes in them; None: the ranks have not agreed yet on what they share of it.
        checks: of the pieces of shared state that other ranks of this node store.
        is_unsettled: whether the ranks must first agree on what they share of it. The trainer waits meanwhile.
        waits_for_room: whether the slots were too small to stage into. The trainer waits until they are larger.
        has_deferred: whether anything is copied later: only then the courier asks for that.
        begun_s: when it began, by the clock that all processes of a node have in common (`time.perf_counter`).
        filled_s: when it was staged, by the same clock; of a courier that is a process: when that was told of it.
    """

    step: int
    problem: MlflashError | None = None
    skip: bool = False
    slot: int | None = None
    share: int | None = None
    files: tuple[int, int] = (0, 0)
    inode: int = 0
    plan: Plan | None = None
    checks: dict[Piece, int] = dataclasses.field(default_factory=dict)
    is_unsettled: bool = False
    waits_for_room: bool = False
    has_deferred: bool = False
    begun_s: float = dataclasses.field(default_factory=time.perf_counter)
    filled_s: float = 0.0

    def __post_init__(self) -> None:
        self.problem = self.problem or SaveFailed("an exception came before it was staged", step=self.step)

    @property
    def filled(self) -> list[tuple[SlotId, int]]:
        """The slots that are handed to the courier, and the inodes of their files."""
        named = ((False, self.slot, self.files[0]), (True, self.share, self.files[1]))
        return [(SlotId(kind, number), inode) for kind, number, inode in named if number is not None]


class Trainer(Shareable, Protocol):
    """What the courier asks of the trainer in the middle of a save. None of it is collective."""

    def lay_out(self) -> Plan:
        """Lay it out, now that they have agreed."""

    def stage(self) -> tuple[int, dict[Piece, int]]:
        """Copy the state into the slots, which have room now; gives the inode and the checksums of the request.

        The call that saves goes on when this has failed, or at `handed_over`.
        """

    def handed_over(self) -> None:
        """Hear that the courier has what `stage` gave: it needs the trainer for nothing but copies left for later."""

    def begin_deferred(self) -> None:
        """Begin with the copies that the save has left for later."""

    def finish_deferred(self) -> tuple[MlflashError | None, dict[Piece, int]]:
        """Wait until they are made; gives why they are of no use, and the checksums of the request, all made now."""

    def is_changed(self) -> MlflashError | None:
        """Look whether anything has changed what was copied later; gives why that is of no use."""

    def cancel_deferred(self) -> None:
        """Give up the copies that have not begun, and wait for the others.

        Raises:
            DeadlineExceeded: something is still being written.
        """

    def ended(self, error: MlflashError | None, skipped: bool = False, at: float | None = None) -> None:
        """Hear how the save has ended: committed where there is no error.

        Args:
            at: when, seconds of `time.monotonic`, which is the same clock for all processes of a host; None: now.
        """
