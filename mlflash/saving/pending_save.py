"""The trainer's side of one save that its courier works on: the live state, what is copied later, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..errors import MlflashError, SaveFailed
from ..events import Event
from ..memory.own_slots import OwnSlots, SlotFile
from ..memory.slot import Slot
from ..protocol.ranks import Ranks
from ..protocol.save_request import SaveRequest
from ..redundancy.deduplication import Piece, Plan, ShareableLeaf, digests, shareable
from ..state.leaves import Flat
from .deferred_copies import DeferredCopies
from .snapshot import Snapshot


class LiveState:
    """Answers the courier's questions about a state that ranks may share: see `save_request.Shareable`."""

    def __init__(self, flat: Flat | None, ranks: Ranks):
        self.flat, self._ranks = flat, ranks

    def shareable(self) -> list[ShareableLeaf]:
        return [] if self.flat is None else shareable(self.flat, self._ranks.from_torch)

    def digests(self, keys: Collection[int]) -> dict[int, int]:
        return {} if self.flat is None else digests(self.flat, keys)


class PendingSave(LiveState):
    """Answers the courier's questions during a save: see `save_request.Trainer`."""

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
        self.left = ""
        # set when the slots are filled and the courier has them, or when the save cannot be staged or has ended
        self.staged = Event()

    def take_over(self, slot: Slot, share: Slot, plan: Plan, inode: int) -> None:
        """Save what is in own slots that were filled for something else."""
        self._slots.hand_over((slot, share), self.request)
        self.request.lease, self.request.plan, self.request.inode = slot.lease, plan, inode

    def defer(self, later: DeferredCopies) -> None:
        """Make the courier wait for what is copied after `save` has returned."""
        if not later.is_empty:
            self.later = self.snapshot.later = later
            self.request.has_deferred = True

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
            self.staged.set()
            raise

    def handed_over(self) -> None:
        self.staged.set()

    def _refuse_left(self) -> None:
        if self.left:
            raise SaveFailed(self.left)

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
        self.later.look()
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
        self.staged.set()
