"""The messages of a trainer to its courier, as plain data. `courier/session.py` has a handler for each.

Most messages are jobs. The courier does them one after the other, in the order in which they are posted. Every rank
posts the same jobs in the same order, so a job is collective over the world unless its docstring says otherwise. The
messages of the last section are not jobs and not collective: the courier answers them at once, even while a job waits
for other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MlflashError
from ..memory.own_slots import SlotFile, SlotId
from ..memory.slot_header import Attempt
from ..memory.wanted_step import WantedStep
from ..placement.topology import Topology
from ..redundancy.deduplication import SharingNews
from ..redundancy.rank_checkpoint import ShareFiles
from .save_request import SaveRequest
from .wanted_parts import WantedPart


@dataclasses.dataclass(frozen=True)
class Message:
    """A request to the courier."""


# Start and end


@dataclasses.dataclass(frozen=True)
class Start(Message):
    """Connect the ranks, lock the job, find what earlier runs left, and take their files over. Returns `Started`.

    Attributes:
        problem: why this rank cannot take part; it is raised on all ranks.
        replicas: the ranks that hold the same state as this one, ascending, and patterns for the names of that state;
            None: the user has not said so.
        domains: the failure domains; see `failure_domains.from_argument`.
        start: name of this trainer; see `heartbeat.RankFacts`.
        left_at: if an earlier courier has died: the newest step whose save had ended on this rank; None: no courier has
            died, or no save has ended.
        interrupted: the newest unit that this rank was in when that courier died, see `courier.units`; 0: none.
        goes_on: whether an earlier courier has died, and training goes on.
    """

    problem: MlflashError | None
    replicas: tuple[Sequence[int], Sequence[str]] | None
    domains: Any
    start: str
    left_at: int | None = None
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
    interrupted: int  # the newest interrupted unit of all ranks


class GoBeyond(Message):
    """Continue the numbering of attempts after those in the directory."""


class ProtectLeft(Message):
    """Make the redundancy whole of the newest step in memory, in whose save another courier may have died.

    The result is this step and its generation; None and 0: there is no step that counts as committed.
    """


class Free(Message):
    """Free windows, communicators and threads as soon as all ranks ask for it. After the answer a rank may leave."""


# Agreement


@dataclasses.dataclass(frozen=True)
class Agree(Message):
    """Take the minimum of each number over all ranks."""

    values: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Gather(Message):
    """Give every rank the bytes of every rank."""

    content: bytes


@dataclasses.dataclass(frozen=True)
class Broadcast(Message):
    """Give every rank the bytes of one rank."""

    content: bytes
    root: int


@dataclasses.dataclass(frozen=True)
class RaiseTogether(Message):
    """If any rank has an error, raise it on all ranks."""

    error: MlflashError | None


# Saving


@dataclasses.dataclass(frozen=True)
class Commit(Message):
    """Complete a save, and return the generation of its attempt; the trainer answers as `save_request.Trainer`."""

    request: SaveRequest


@dataclasses.dataclass(frozen=True)
class Reserve(Message):
    """Make slots, and those of their redundancy; see `Context.reserve`."""

    nbytes: int
    share_nbytes: int
    is_first: bool


@dataclasses.dataclass(frozen=True)
class FindReplicas(Message):
    """Find the ranks that hold the same state; see `Context.find_replicas`."""

    held: Mapping[tuple[int, ...], int]


@dataclasses.dataclass(frozen=True)
class SettleShared(Message):
    """Agree on what is shared of a state not yet saved; the trainer answers as `deduplication.Shareable`."""

    held: Mapping[tuple[int, ...], int]


# Restoring


@dataclasses.dataclass(frozen=True)
class Choose(Message):
    """Choose between memory and directory, and fetch a checkpoint in memory to where it can be read.

    Returns `FoundInMemory`, the `checkpoint_directory.Listed` of a directory, or None.

    Attributes:
        wanted: conditions for the checkpoint.
        others: whether checkpoints of another number of ranks count, too.
        source: another directory, to be used instead of memory; None: memory and the job's own directory.
        bad: folders of the directory to skip, and why.
        checked: whether to verify every byte of what is in memory.
        again: whether to take the checkpoint just chosen with ``remember``, if it fits and is unchanged.
        remember: whether to remember the checkpoint for the next `Choose`.
    """

    wanted: WantedStep
    others: bool
    source: str | None
    bad: Mapping[str, str]
    checked: bool
    again: bool
    remember: bool


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


@dataclasses.dataclass(frozen=True)
class Exchange(Message):
    """Fetch parts of a checkpoint in memory from other ranks (``asked``, by rank). Returns whether all arrived intact.

    ``homes``: by old rank, the numbers of the files that this rank reads for others.
    """

    attempt: Attempt
    homes: Mapping[int, int]
    files: ShareFiles
    asked: Mapping[int, Sequence[WantedPart]]


@dataclasses.dataclass(frozen=True)
class HoldOlder(Message):
    """Protect the own slots with other steps than the restored one, which slot ``own`` holds, until it is healed."""

    own: int


@dataclasses.dataclass(frozen=True)
class HealFirst(Message):
    """Restore the redundancy of a step before it is read; ``own`` as in `HoldOlder`."""

    own: int


@dataclasses.dataclass(frozen=True)
class Restored(Message):
    """Note that a step was restored, from own slot ``own``; None: it was put together, or came from a directory."""

    own: int | None


@dataclasses.dataclass(frozen=True)
class HealRestored(Message):
    """Restore the redundancy of the restored step; ``own`` as in `HoldOlder`."""

    own: int


@dataclasses.dataclass(frozen=True)
class MakeRoom(Message):
    """Make room in own slots that the trainer has taken and keeps: ``nbytes`` in the first."""

    slots: Sequence[tuple[SlotId, int]]  # and the inodes of the files that the trainer has for them
    nbytes: int
    gives_way: bool  # whether files that are left aside may be deleted for it


@dataclasses.dataclass(frozen=True)
class CommitRestored(Message):
    """Commit the state that a restore has put together, like a save; the trainer answers as `save_request.Trainer`."""

    request: SaveRequest
    restores: int


@dataclasses.dataclass(frozen=True)
class Steps(Message):
    """List the steps that can be restored, according to headers; with ``alike`` only those of as many ranks as now."""

    alike: bool


# Draining, and what needs no training


@dataclasses.dataclass(frozen=True)
class BeginDrain(Message):
    """Begin to drain the newest checkpoint; with ``if_due`` only if draining is on and it is not drained yet."""

    if_due: bool


class Scavenge(Message):
    """Begin to drain the newest checkpoint in memory, without training. Returns whether there is one."""


@dataclasses.dataclass(frozen=True)
class Mark(Message):
    """Write a verdict on a step into all its files. Returns the number of places in memory and directory."""

    step: int
    is_good: bool


class HealNewest(Message):
    """Restore the redundancy of the newest checkpoint, without training. Returns its step, or None."""


# Answered at once


class AskDrain(Message):
    """Drain the checkpoint that is committed next."""


class GiveUpDrain(Message):
    """End a drain that is under way soon, and delete what it has written."""


class Report(Message):
    """Return counters and more; see `courier.session.report_of`."""


class RunFacts(Message):
    """Return facts that do not change during this run."""


class Survives(Message):
    """Return what may fail without the loss of a committed step."""
