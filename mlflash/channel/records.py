"""What trainer and courier tell each other, as plain data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ..errors import MlflashError, SaveFailed
from ..memory.inventory import WantedStep
from ..memory.own_slots import SlotFile
from ..memory.slot import Attempt
from ..placement.topology import Topology
from ..protect.deduplication import Piece, Plan, Shareable, SharingNews
from ..protect.rank_checkpoint import ShareFiles


@dataclasses.dataclass(frozen=True)
class Start:
    """How a trainer starts, or why it cannot.

    Attributes:
        problem: why this rank cannot take part; it is raised on all ranks.
        replicas: the ranks that hold the same state as this one, ascending, and patterns for the names of that state;
            None: the user has not said so.
        domains: the failure domains; see `failure_domains.from_argument`.
        name: of this trainer; see `heartbeat.RankFacts`.
        ended_step: if an earlier courier has died: the newest step whose save had ended on this rank; None: no courier
            has died, or no save has ended.
        interrupted: the newest restart scope that this rank was in when that courier died, see `Client`; 0: none.
        goes_on: whether an earlier courier has died, and training goes on.
    """

    problem: MlflashError | None
    replicas: tuple[Sequence[int], Sequence[str]] | None
    domains: Any
    name: str
    ended_step: int | None = None
    interrupted: int = 0
    goes_on: bool = False


@dataclasses.dataclass(frozen=True)
class Started:
    """What a trainer learns at the start."""

    rank: int
    topology: Topology
    top: str
    slots: int
    copy_threads: int
    unusable: bool  # whether memory has a committed step that cannot be restored, according to headers
    files: Sequence[SlotFile]
    sharing: SharingNews
    run: str
    interrupted: int  # the newest interrupted scope of all ranks
    goes_on: bool  # whether any rank had a courier before
    facts: Mapping[str, Any]  # what does not change during this run, for its recorder


@dataclasses.dataclass(frozen=True)
class Search:
    """What a restore looks for, and what it passes over."""

    wanted: WantedStep
    source: str | None = None  # a directory to be used instead of memory; None: memory and the job's own directory
    others: bool = False  # whether another number of ranks may have saved it
    broadcast: Collection[str] = ()  # names of entries whose bytes every rank needs
    checked: bool = True  # whether every byte of what is in memory is verified
    remember: bool = False  # whether the next search may take what this one has verified
    bad: dict[str, str] = dataclasses.field(default_factory=dict)  # folders of the directory to pass over, and why


@dataclasses.dataclass(frozen=True)
class FoundInMemory:
    """A checkpoint in the memory of the nodes, verified as requested."""

    attempt: Attempt
    step: int
    restores: int  # how many runs have restored it, including this one
    own: int | None  # number of the own slot that holds it, if the same ranks saved it
    homes: Mapping[int, int]  # otherwise, by old rank, the numbers of the files that this rank reads for all ranks
    files: ShareFiles  # where shares are
    rolled_forward: bool  # whether no rank has seen its commit
    restored_from: str  # the node that it came from, or how it was made


@dataclasses.dataclass(eq=False)
class SaveRequest:
    """One save, as the trainer has staged it or failed to.

    Attributes:
        problem: why this rank cannot take part; then it only says so. It is set from the start, so that a save that an
            exception ends does not count as staged.
        skip: whether this rank's slots are busy and all ranks must skip the save.
        lease: of the own slots that the state is staged into; 0: none.
        inode: of the file of the staged slot; 0: it is not staged yet.
        plan: the layout of the state in the slots; None: the ranks have not yet agreed on what they share of it.
        checks: checksums of the pieces of shared state that other ranks of this node store.
        is_unsettled: whether the ranks must first agree on what they share. Meanwhile the trainer waits.
        waits_for_room: whether the slots were too small. The trainer waits until they are larger.
        has_deferred: whether some of the state is copied later (`save.deferred_copies`).
        begun_s: when the save began, by the clock of all processes of a node (`time.perf_counter`).
        filled_s: when it was staged, by the same clock; in the courier: when the courier was told.
    """

    step: int
    problem: MlflashError | None = None
    skip: bool = False
    lease: int = 0
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

    def fail(self, problem: MlflashError) -> None:
        """Make it one that only fails, like the saves of the same step on other ranks."""
        self.problem = self.problem or problem
        self.lease, self.plan = 0, None
        self.is_unsettled = self.waits_for_room = self.skip = self.has_deferred = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, filled_s=time.perf_counter())


class Trainer(Shareable, Protocol):
    """What the courier tells its trainer, and what it asks it in the middle of a save. None of it is collective."""

    def update(self, files: Sequence[SlotFile], has_free: bool, sharing: SharingNews | None, is_unprotected: bool
               ) -> None:  # fmt: skip
        """Note what has changed.

        Args:
            files: new ones of own slots.
            has_free: whether own slots may be free.
            sharing: what ranks share; None: as before.
            is_unprotected: whether the restored step does not have full redundancy yet.
        """

    # In the middle of a save

    def lay_out(self) -> Plan:
        """Lay the state out, after the ranks have agreed."""

    def stage(self, files: Sequence[SlotFile]) -> tuple[int, dict[Piece, int], bool]:
        """Copy the state into the leased slots, which have room now: these are their files.

        Return the inode and the checksums of the request, and whether something is copied later.

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
