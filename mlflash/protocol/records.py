"""What trainer and courier tell each other, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MlflashError
from ..memory.own_slots import SlotFile
from ..memory.slot_header import Attempt
from ..placement.topology import Topology
from ..redundancy.deduplication import SharingNews
from ..redundancy.rank_checkpoint import ShareFiles


@dataclasses.dataclass(frozen=True)
class Start:
    """How a trainer starts, or why it cannot.

    Attributes:
        problem: why this rank cannot take part; it is raised on all ranks.
        replicas: the ranks that hold the same state as this one, ascending, and patterns for the names of that state;
            None: the user has not said so.
        domains: the failure domains; see `failure_domains.from_argument`.
        name: of this trainer; see `heartbeat.RankFacts`.
        left_at: if an earlier courier has died: the newest step whose save had ended on this rank; None: no courier has
            died, or no save has ended.
        interrupted: the newest unit that this rank was in when that courier died, see `courier.units`; 0: none.
        goes_on: whether an earlier courier has died, and training goes on.
    """

    problem: MlflashError | None
    replicas: tuple[Sequence[int], Sequence[str]] | None
    domains: Any
    name: str
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
