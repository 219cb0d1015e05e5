"""Measures planning, the inventory and the choice of what to restore on one rank, and checks their results.

Random losses go through `Survival.survives`, and some also through the choice of what to restore. They are compared
with the exact probability.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scale.tables import NODES_PER_RACK, PER_NODE, RACKS_PER_ROW, inventories

from mlflash.memory.inventory import Inventory, decode, encode, join
from mlflash.placement.failure_domains import from_lines
from mlflash.placement.protection_groups import Placement, place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.survival import Survival, describe, of
from mlflash.placement.topology import Topology, from_node_ids
from mlflash.startup.choose_checkpoint import choose

SCHEMES = ("copy", "xor:8", "rs:6+2")
RANKS = (1024, 4096, 16_384, 65_536, 131_072)
PLANNING_S, INVENTORY_MB, AIMED_RANKS = 1.0, 4.0, 16_384
_CHOICES = 3  # number of losses that also go through the choice of what to restore


@dataclasses.dataclass
class Row:
    """What was measured for one scheme and size. Seconds are CPU time of one rank.

    Attributes:
        groups: number of redundancy groups.
        domains_s: time to read a file of rows and racks.
        planning_s: time for topology, placement, holders of copies, and the description of what the job survives.
        lost: number of nodes lost at once in the simulation.
        exact, simulated, error: probability that memory is enough, and the standard error of the simulated one.
        sent_nbytes: size of one node's inventory on the wire.
        received_mb: size of the inventories of all nodes, which each node receives.
        table_mb: size of the table that every rank holds while it chooses.
        encode_s: time to encode the inventory of one node.
        join_s: time to decode and join the inventories of all nodes.
        choose_s: time for the choice of what to restore, with one node lost.
        wrong: the contradiction between two numbers. Empty if there is no contradiction.
    """

    ranks: int
    scheme: str
    groups: int = 0
    domains_s: float = 0.0
    planning_s: float = 0.0
    lost: int = 0
    exact: float = 0.0
    simulated: float = 0.0
    error: float = 0.0
    sent_nbytes: float = 0.0
    received_mb: float = 0.0
    table_mb: float = 0.0
    encode_s: float = 0.0
    join_s: float = 0.0
    choose_s: float = 0.0
    wrong: str = ""


def measure(ranks: int, scheme: str, samples: int, seed: int) -> Row:
    """Measure one scheme with this number of ranks."""
    row = Row(ranks, scheme)
    row.domains_s, places = timed(lambda: places_of(ranks // PER_NODE))
    row.planning_s, (topology, placed, found) = timed(lambda: plan(ranks, scheme, places))
    row.groups = len(placed.parity_groups) or len(set(placed.connected))
    losses, outcomes = lose_at_random(row, found, samples, seed)

    parts = inventories(topology, placed)
    row.encode_s, packed = timed(lambda: [encode(part) for part in parts])
    row.encode_s /= len(parts)
    row.sent_nbytes = sum(map(len, packed)) / len(packed)
    row.received_mb = sum(map(len, packed)) / 1e6
    row.join_s, everything = timed(lambda: join([decode(part) for part in packed]))
    tuples_nbytes = sum(40 + 40 * len(group) for group in everything.groups)  # of int
    row.table_mb = (everything.rows.nbytes + tuples_nbytes) / 1e6
    one = without(everything, [found.nodes // 2])
    row.choose_s, choice = timed(lambda: choose(one, topology.node_of))
    if choice is None or choice.attempt.generation != 42:
        row.wrong = "the checkpoint did not survive one lost node"
    for number in {*range(_CHOICES), *(outcomes.index(outcome) for outcome in set(outcomes))}:
        restorable = choose(without(everything, losses[number]), topology.node_of) is not None
        if restorable != outcomes[number]:
            row.wrong = f"loss of nodes {sorted(losses[number])}: survived {outcomes[number]}, restorable {restorable}"
    return row


def lose_at_random(row: Row, found: Survival, samples: int, seed: int) -> tuple[list[list[int]], list[bool]]:
    """Lose random nodes, and compare how often that is survived with the exact chance. Gives losses and outcomes."""
    rng = random.Random(seed)
    row.lost, row.exact = open_loss(found)
    losses = [rng.sample(range(found.nodes), row.lost) for _ in range(samples)]
    outcomes = [found.survives(lost) for lost in losses]
    row.simulated = sum(outcomes) / samples
    row.error = math.sqrt(row.exact * (1 - row.exact) / samples)
    if abs(row.simulated - row.exact) > 5 * row.error:
        row.wrong = f"chance that memory is enough: simulated {row.simulated}, exact {row.exact} ± {row.error}"
    return losses, outcomes


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function, and return the seconds of CPU time and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def places_of(nodes: int) -> list[tuple[str, ...]]:
    """Read a file of failure domains for this number of nodes, and give the row and rack of each."""
    lines = ["levels: row rack"]
    for first in range(0, nodes, NODES_PER_RACK):
        rack = first // NODES_PER_RACK
        last = min(first + NODES_PER_RACK, nodes) - 1
        lines.append(f"n[{first:06d}-{last:06d}] row{rack // RACKS_PER_ROW} rack{rack}")
    domains = from_lines("\n".join(lines))
    return [domains.names(f"n{node:06d}") for node in range(nodes)]


def plan(ranks: int, scheme: str, places: Sequence[tuple[str, ...]]) -> tuple[Topology, Placement, Survival]:
    """Plan as every rank does when it creates a Checkpointer."""
    topology = from_node_ids([(rank // PER_NODE * PER_NODE, f"n{rank // PER_NODE:06d}") for rank in range(ranks)])
    placed = place(topology, parse(scheme), places)
    assert placed.owners and placed.connected and placed.parity_group_of is not None
    found = of(topology, placed)
    assert describe(found, {"row": [row for row, _ in places], "rack": [rack for _, rack in places]})
    return topology, placed, found


def open_loss(found: Survival) -> tuple[int, float]:
    """Find the number of lost nodes that memory survives with a chance closest to a half, and give that chance."""
    most = round(found.nodes ** (2 / 3))
    good = found.surviving(most)
    chances = [count / math.comb(found.nodes, lost) for lost, count in enumerate(good)]
    lost = min(range(1, most + 1), key=lambda lost: abs(chances[lost] - 0.5))
    return lost, chances[lost]


def without(everything: Inventory, nodes: Sequence[int]) -> Inventory:
    """Give the inventory without what some nodes hold."""
    return Inventory(everything.rows[~np.isin(everything.rows["node"], list(nodes))], everything.groups)
