"""A save request from a trainer to its courier, as plain data, and what the courier asks the trainer meanwhile."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

from ..errors import MlflashError, SaveFailed
from ..memory.own_slots import SlotId
from ..redundancy.deduplication import Piece, Plan, Shareable


@dataclasses.dataclass(eq=False)
class SaveRequest:
    """One save, as the trainer has staged it or failed to.

    Attributes:
        problem: why this rank cannot take part; then it only sends a failed receipt. It is set from the start, so that
            a save does not look staged if an exception ends it before.
        skip: whether this rank's slots are busy and all ranks must skip the save.
        slot, share: numbers of the own slots that the state is staged into. The second one gets this rank's share of
            shared state.
        files: inodes of the two files that the trainer has mapped; 0: none.
        inode: of the file of the staged slot; 0: it is not staged yet.
        plan: the layout of the state in the slots; None: the ranks have not yet agreed on what they share of it.
        checks: checksums of the pieces of shared state that other ranks of this node store.
        is_unsettled: whether the ranks must first agree on what they share. Meanwhile the trainer waits.
        waits_for_room: whether the slots were too small. The trainer waits until they are larger.
        begun_s: when the save began, by the clock of all processes of a node (`time.perf_counter`).
        filled_s: when it was staged, by the same clock; in a courier: when it was told.
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
        self.problem = self.problem or SaveFailed("an exception ended the save before it was staged", step=self.step)

    @property
    def filled(self) -> list[tuple[SlotId, int]]:
        """The slots that the courier gets, and the inodes of their files."""
        named = ((False, self.slot, self.files[0]), (True, self.share, self.files[1]))
        return [(SlotId(kind, number), inode) for kind, number, inode in named if number is not None]


class Trainer(Shareable, Protocol):
    """What the courier asks the trainer in the middle of a save. None of it is collective."""

    def lay_out(self) -> Plan:
        """Lay the state out, after the ranks have agreed."""

    def stage(self) -> tuple[int, dict[Piece, int]]:
        """Copy the state into the slots, which have room now. Return the inode and the checksums of the request.

        The call of `save` continues when this has failed, or at `handed_over`.
        """

    def handed_over(self) -> None:
        """Note that the courier has the result of `stage`. It only needs the trainer for deferred copies now."""

    def begin_deferred(self) -> None: ...

    def finish_deferred(self) -> tuple[MlflashError | None, dict[Piece, int]]:
        """Wait for the deferred copies. Return why they are useless, if they are, and all checksums of the request."""

    def is_changed(self) -> MlflashError | None:
        """Check whether anything has changed what was copied later; if so, return why the copies are useless."""

    def cancel_deferred(self) -> None:
        """Cancel the copies not begun, and wait for the others. Raises DeadlineExceeded if one does not end."""

    def ended(self, error: MlflashError | None, skipped: bool = False, at: float | None = None) -> None:
        """Note how the save has ended: it is committed if there is no error.

        Args:
            at: when, by `time.monotonic`, which is the same clock for all processes of a host; None: now.
        """
