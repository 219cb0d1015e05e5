"""The options of `mlflash run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What to run, and how.

    Attributes:
        argv: the program of each rank.
        nodes, ranks_per_node: number of nodes, and of ranks on each.
        least: smallest number of nodes that is enough, for training that reshards; 0: all.
        max_restarts: number of restarts that are allowed.
        job, memory: where the ranks keep their slots.
        directory: where to copy the newest checkpoint at the end; None: nowhere.
        keep_memory: whether the slots stay in memory at the end.
        hang_timeout_s: seconds without a save after which a run counts as hanging; 0: never.
        look_every_s: seconds between two looks at the nodes.
        grace_s: seconds that training has for one more checkpoint after a signal to end.
        gpus: number of GPUs that must answer on each node; 0: no check.
        interface: the network interface that must be up; "": no check.
    """

    argv: Sequence[str]
    nodes: int
    ranks_per_node: int
    least: int
    max_restarts: int
    job: str
    memory: str
    directory: str | None
    keep_memory: bool
    hang_timeout_s: float
    look_every_s: float
    grace_s: float
    gpus: int
    interface: str
