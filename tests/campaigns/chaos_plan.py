"""What chaos.py will do next, from its seed; and what the memory that is left must still give."""

from __future__ import annotations

import dataclasses
import random

from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.survival import of
from mlflash.placement.topology import Topology

KILL = "kill a rank"
LOSE = "lose a node"
POWER = "lose a node, kill all"
STOP = "stop a rank, go on"
STOP_KILL = "stop a rank, kill it"
EARLY = "kill during the start"
EARLY_LOSE = "lose a node during the start"
FLIP = "kill all, flip a bit"
UNCOVERED = "lose both partners"
TRAINER = "kill a trainer"  # its courier commits what it has
COURIER = "kill a courier, go on"
ZYGOTE = "kill a zygote, go on"
_WEIGHTS = {KILL: 14, LOSE: 18, POWER: 14, STOP: 14, STOP_KILL: 8, EARLY: 10, EARLY_LOSE: 12, FLIP: 10, UNCOVERED: 3}
_WHERE_PROCESSES = {TRAINER: 14, COURIER: 14, ZYGOTE: 6}


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing to do to the job.

    Args:
        number: the how-manieth.
        kind: one of the names above.
        rank: whom it hits; a node is lost with all its ranks.
        delay_s: after the start of the launch where it is to hit the start, else after its first step.
        after_save_s: wait then for the rank's next save, and for so long into it, seconds; None: do not.
        stop_s: how long the rank is stopped, seconds.
        spot: where a bit flips: file and place in it, as fractions.
    """

    number: int
    kind: str
    rank: int
    delay_s: float
    after_save_s: float | None
    stop_s: float
    spot: tuple[float, float, int]

    @property
    def during_start(self) -> bool:
        return self.kind in (EARLY, EARLY_LOSE)


def event(seed: int, number: int, ranks: int, start_s: float, courier: str = "thread") -> Event:
    """Draw an event: the same for the same seed and number, whatever happened before.

    Args:
        start_s: how long a launch takes to its first step, seconds; those that hit the start come within it.
        courier: what couriers are: a thread or a process.
    """
    dice = random.Random(f"{seed}/{number}")
    weights = _WEIGHTS | (_WHERE_PROCESSES if courier == "process" else {})
    kind = dice.choices(list(weights), list(weights.values()))[0]
    rank, share = dice.randrange(ranks), dice.random()
    # Half of those that hit the start come late in it: that is where slots are fetched and copies are made again.
    late = dice.random() < 0.5
    delay_s = start_s * (0.8 + 0.4 * share if late else 1.1 * share)
    if kind not in (EARLY, EARLY_LOSE):
        delay_s = share * (0.1 if dice.random() < 0.25 else 4.0)
    stop_s = dice.uniform(2, 20) if kind == STOP else dice.uniform(0, 15)
    after_save_s = dice.choice((None, dice.uniform(0, 0.01), dice.uniform(0, 0.1)))
    return Event(number, kind, rank, delay_s, after_save_s, stop_s, (dice.random(), dice.random(), dice.randrange(8)))


class Memory:
    """What the nodes' memory must give, as far as the driver can know it.

    Args:
        ranks: number of ranks.
        ranks_per_node: ranks on each node.
        redundancy: the scheme.

    Attributes:
        nodes: number of nodes.
        broken: nodes that lost something since all slots and copies were known to be in place.
        promised: the newest step that must be restored, if not a newer one; None where nothing is promised.
        lost: whether more was lost than is covered, so that it may be told that nothing can be restored.
    """

    def __init__(self, ranks: int, ranks_per_node: int, redundancy: str = "copy"):
        node_of = tuple(rank // ranks_per_node for rank in range(ranks))
        self.nodes = node_of[-1] + 1
        topology = Topology(node_of, tuple(f"node{node}" for node in range(self.nodes)))
        self.ranks_on = topology.ranks_on
        placement = place(topology, parse(redundancy))
        self._survival = of(topology, placement)
        self._group = {node: group for group in placement.node_groups for node in group}
        self.broken: set[int] = set()
        self.promised: int | None = None
        self.lost = False

    def node(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.ranks_on) if rank in ranks)

    def uncovered(self, node: int) -> set[int]:
        """A node and as many of its group as may not be lost with it."""
        lost = [node]
        for other in self._group[node]:
            if self._survival.survives(lost) and other != node:
                lost.append(other)
        return set(lost)

    def covers(self, nodes: set[int], whole: bool = False) -> bool:
        """Whether these nodes may be lost too: every slot is still somewhere, or can be rebuilt.

        Args:
            whole: a step was seen in all its places since.
        """
        return self._survival.survives(nodes if whole else self.broken | nodes) and (whole or not self.lost)

    def keep(self, step: int) -> None:
        """A step is whole again in all its places."""
        self.broken, self.promised, self.lost = set(), step, False

    def lose(self, nodes: set[int]) -> None:
        """Something on these nodes is gone."""
        if not self.covers(nodes):
            self.lost, self.promised = True, None
        self.broken |= nodes
