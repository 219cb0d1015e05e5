"""What a trainer asks its courier for, as plain data. `courier/session.py` has one handler for each.

Jobs are done one after the other, in the order in which they are posted, and every rank posts the same ones in the same
order: each is collective over the world, but for those that say otherwise. What is asked at once is answered beside
the jobs, also while one of them waits for other ranks; it is not collective.
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
from ..redundancy.rank_checkpoint import ShareFiles
from ..redundancy.shareable_leaves import SharingNews
from .save_request import SaveRequest
from .wanted_parts import WantedPart


class Message:
    """Something that is asked of the courier."""


# Start and end


@dataclasses.dataclass(frozen=True)
class Start(Message):
    """Connect the ranks, lock the job, look what earlier runs left, and take its files over; gives `Started`.

    Attributes:
        problem: why this rank cannot take part; it is raised on all.
        replicas: the ranks that hold the same state as this one, ascending, and the patterns of names of what they hold
            alike; None: nobody has said so.
        domains: where the nodes stand; see `failure_domains.from_argument`.
        start: names this trainer; see `heartbeat.RankFacts`.
        left_at: the newest step whose save has ended on this rank, where an earlier courier has died; None: there was
            none, or no save has ended.
        interrupted: the newest unit that this rank was in when that died, see `courier.units`; 0: none.
    """

    problem: MlflashError | None
    replicas: tuple[Sequence[int], Sequence[str]] | None
    domains: Any
    start: str
    left_at: int | None = None
    interrupted: int = 0


@dataclasses.dataclass(frozen=True)
class Started:
    """What a trainer knows from the start.

    Attributes:
        rank, topology: of this run.
        emulated_node: number of the node that this rank plays; None: a real one.
        top: this user's directory in the node's memory.
        slots: how many own slots there are of each kind.
        copy_threads: how many threads copy.
        unusable: whether memory has what was committed, and cannot give it back as far as its headers tell.
        files: of the own slots.
        sharing: see there.
        run: names this run in events.
        left_step, left_generation: of the newest attempt that memory has whole, as far as headers tell; None, 0: none.
        interrupted: the newest of all ranks'.
    """

    rank: int
    topology: Topology
    emulated_node: int | None
    top: str
    slots: int
    copy_threads: int
    unusable: bool
    files: Sequence[SlotFile]
    sharing: SharingNews
    run: str
    left_step: int | None
    left_generation: int
    interrupted: int


@dataclasses.dataclass(frozen=True)
class GoBeyond(Message):
    """Number on from what is in the directory."""


@dataclasses.dataclass(frozen=True)
class Free(Message):
    """Free windows, communicators and threads, as soon as all ranks want that: who hears that it is done may leave."""


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
    """Give every rank the bytes of one."""

    content: bytes
    root: int


@dataclasses.dataclass(frozen=True)
class RaiseTogether(Message):
    """Raise on every rank what went wrong on any."""

    error: MlflashError | None


# Saving


@dataclasses.dataclass(frozen=True)
class Commit(Message):
    """Bring a save to its end, and give the generation of its attempt; with answers of `save_request.Trainer`."""

    request: SaveRequest


@dataclasses.dataclass(frozen=True)
class Reserve(Message):
    """Make slots, and those of their redundancy; see `Context.reserve`."""

    nbytes: int
    share_nbytes: int
    is_first: bool


@dataclasses.dataclass(frozen=True)
class FindReplicas(Message):
    """Look which ranks hold the same; see `Context.find_replicas`."""

    held: Mapping[tuple[int, ...], int]


@dataclasses.dataclass(frozen=True)
class SettleShared(Message):
    """Agree on what is shared of a state that is not saved yet; with answers of `shareable_leaves.Shareable`."""

    held: Mapping[tuple[int, ...], int]


# Restoring


@dataclasses.dataclass(frozen=True)
class Choose(Message):
    """Choose between memory and directory, and bring what memory has to where it can be read.

    Gives `FoundInMemory`, the `checkpoint_directory.Listed` of a directory, or None.

    Attributes:
        wanted: what it has to be.
        others: also what other ranks have saved.
        source: another directory, and memory is not looked at; None: the job's own.
        bad: folders of the directory that are passed over, and why.
        checked: verify every byte of what is in memory.
        again: take what was chosen with ``remember`` just now, if it is what is asked for, and unchanged.
        remember: for the next one.
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
    """A checkpoint in the memory of the nodes, verified as far as it was asked.

    Attributes:
        attempt, step, world_size: of it.
        restores: how many runs have restored it, this one included.
        own: number of the own slot that holds it, where its ranks are those of today; else None.
        homes: by old rank, the numbers of the files that this rank reads for all, where they are not.
        files: where shares are.
        rolled_forward: whether no rank has seen it committed.
        restored_from: the node that it came from, or how it was made.
    """

    attempt: Attempt
    step: int
    restores: int
    own: int | None
    homes: Mapping[int, int]
    files: ShareFiles
    rolled_forward: bool
    restored_from: str


@dataclasses.dataclass(frozen=True)
class Exchange(Message):
    """Bring parts of a checkpoint in memory from other ranks; gives whether all arrived whole.

    Attributes:
        attempt: of it.
        homes: by old rank, the numbers of the files that this rank reads for others.
        files: where shares are.
        asked: by rank, what that one is asked for.
    """

    attempt: Attempt
    homes: Mapping[int, int]
    files: ShareFiles
    asked: Mapping[int, Sequence[WantedPart]]


@dataclasses.dataclass(frozen=True)
class HoldOlder(Message):
    """Keep what own slots hold besides the restored step from being written, until that one is healed.

    Attributes:
        own: number of the slot that holds it.
    """

    own: int


@dataclasses.dataclass(frozen=True)
class HealFirst(Message):
    """Make the redundancy of a step whole before it is read; ``own`` as in `HoldOlder`."""

    own: int


@dataclasses.dataclass(frozen=True)
class Restored(Message):
    """Note that a step was restored. Not collective.

    Attributes:
        own: number of the own slot that it came from; None: it was put together, or came from a directory.
    """

    own: int | None


@dataclasses.dataclass(frozen=True)
class HealRestored(Message):
    """Make the redundancy of the restored step whole; ``own`` as in `HoldOlder`."""

    own: int


@dataclasses.dataclass(frozen=True)
class MakeRoom(Message):
    """Make room in own slots that the trainer has taken and keeps.

    Attributes:
        slots: the slots, and the inodes of the files that the trainer has for them.
        nbytes: that the first one has to take.
        gives_way: files that are left aside may be deleted for it.
    """

    slots: Sequence[tuple[SlotId, int]]
    nbytes: int
    gives_way: bool


@dataclasses.dataclass(frozen=True)
class CommitRestored(Message):
    """Commit what a restore has put together, as a save of its own; with answers of `save_request.Trainer`.

    Attributes:
        request: where it is.
        restores: how many runs have restored it, this one included.
    """

    request: SaveRequest
    restores: int


@dataclasses.dataclass(frozen=True)
class Steps(Message):
    """List the steps that can be restored, as headers tell; with ``alike`` those that as many ranks have saved."""

    alike: bool


# Draining, and what needs no training


@dataclasses.dataclass(frozen=True)
class BeginDrain(Message):
    """Begin to drain the newest checkpoint; with ``if_due`` only where draining is on, and it was not yet."""

    if_due: bool


@dataclasses.dataclass(frozen=True)
class Scavenge(Message):
    """Begin to drain the newest checkpoint that memory can give, with no training; gives whether there is any."""


@dataclasses.dataclass(frozen=True)
class Mark(Message):
    """Write what somebody says of a step wherever it is; gives in how many places of memory and directory.

    Attributes:
        step: which.
        is_good: what is said.
    """

    step: int
    is_good: bool


@dataclasses.dataclass(frozen=True)
class HealNewest(Message):
    """Make the redundancy of the newest checkpoint whole, with no training; gives its step, or None."""


# At once


@dataclasses.dataclass(frozen=True)
class AskDrain(Message):
    """Let the checkpoint that is committed next be drained."""


@dataclasses.dataclass(frozen=True)
class GiveUpDrain(Message):
    """Let a drain that is on its way end soon, and what it wrote be deleted."""


@dataclasses.dataclass(frozen=True)
class Report(Message):
    """Give counters and the like; see `rank_report.report_of`."""


@dataclasses.dataclass(frozen=True)
class RunFacts(Message):
    """Give what does not change while this run goes on."""


@dataclasses.dataclass(frozen=True)
class Survives(Message):
    """Say what may die without a committed step being lost."""
