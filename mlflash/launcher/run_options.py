"""What `mlflash run` is to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What is to be run.

    Attributes:
        argv: the program of each rank.
        nodes, ranks_per_node: how many.
        least: nodes that will do, for training that reshards; 0: all.
        max_restarts: of them.
        job, memory: where the ranks keep their slots.
        directory: where to scavenge to at the end; None: nothing is scavenged.
        keep_memory: leave the slots where they are at the end.
        hang_timeout_s: seconds without a save after which a run hangs; 0: it never does.
        look_every_s: seconds between two looks at the nodes.
        grace_s: seconds that training has for one more checkpoint, when it is told to end.
        gpus: GPUs that have to answer on each node; 0: nobody asks.
        interface: the network interface that has to be up; "": nobody asks.
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
