"""The plan of a demo, made before it starts."""

from __future__ import annotations

import dataclasses
import os
import random

from ..placement.topology import Topology

RANKS, RANKS_PER_NODE = 4, 2
KEPT_RANKS = 2  # if processes stay
TOPOLOGY = Topology(tuple(rank // RANKS_PER_NODE for rank in range(RANKS)), ("node0", "node1"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens in a demo.

    Attributes:
        steps: training steps.
        seed: seed of the training, and of all random choices here.
        redundancy: "copy" or "none".
        kill_step: the step in which the node or the rank dies.
        doomed: the node that dies; if processes stay, the rank.
        moment: when it dies in the step, 0 to 1.
        job: job name that no other run has.
        keeps: whether the other processes stay when a rank is killed. Otherwise all are started again.
    """

    steps: int
    seed: int
    redundancy: str
    kill_step: int
    doomed: int
    moment: float
    job: str
    keeps: bool

    @property
    def reference(self) -> str:
        """The job name of the uninterrupted run."""
        return f"{self.job}-reference"


def draw(steps: int, seed: int | None, kill_step: int | None, redundancy: str, keeps: bool = False) -> Plan:
    """Choose at random what was not given: the seed, and from it the step, the node or rank, and the moment."""
    chance = random.SystemRandom()
    seed = chance.randrange(10**6) if seed is None else seed
    dice = random.Random(seed)
    # From step 4 on, the first save had time to commit. If processes stay, all must still train when one is killed.
    last = max(4, steps // 2) if keeps else steps - 1
    step = dice.randint(min(4, steps - 1), min(last, steps - 1))
    doomed, moment = dice.randrange(KEPT_RANKS if keeps else len(TOPOLOGY.ranks_on)), dice.random()
    job = f"demo-{os.getpid()}-{chance.randrange(16**8):08x}"
    return Plan(steps, seed, redundancy, kill_step or step, doomed, moment, job, keeps)
