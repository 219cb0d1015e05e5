"""A checkpoint in memory that was found, in the slots of its old ranks."""

from __future__ import annotations

import dataclasses

from ..memory.slot_header import Attempt
from ..redundancy.rank_checkpoint import RankCheckpoint, ShareFiles


@dataclasses.dataclass
class FoundElsewhere:
    """A restorable checkpoint in the slots of its old ranks.

    Attributes:
        attempt, step: of the checkpoint.
        restores: how many runs have restored it, including this one.
        homes: what this rank has or reads, by old rank; verified.
        files: where the shares are.
        same_ranks: whether its ranks are the ranks of this run, each with its own slot.
    """

    attempt: Attempt
    step: int
    restores: int
    homes: dict[int, RankCheckpoint]
    files: ShareFiles
    same_ranks: bool = False
