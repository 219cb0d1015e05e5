"""Generates the tables that each rank gets in a large job: where ranks are, failure domains, what all nodes hold."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlflash.memory.inventory import FOUND, Inventory, join, scan
from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.slot_header import Kind
from mlflash.placement.protection_groups import Placement
from mlflash.placement.topology import Topology

PER_NODE, NODES_PER_RACK, RACKS_PER_ROW = 8, 32, 8
RUN = (0x3F9C_11D7_A6E2_5B48, 0xC471_0E8D_92F3_6AB5)


def inventories(topology: Topology, placed: Placement) -> list[Inventory]:
    """Generate what the first rank of each node finds: two slots of each rank, and two of each copy and parity file."""
    found = []
    for node, ranks in enumerate(topology.ranks_on):
        groups = list(dict.fromkeys(placed.parity_group_of[rank] for rank in ranks if placed.parity_group_of[rank]))
        # Rank, number of the group, parity blocks of a stripe.
        files = [(rank, 0, 0) for rank in ranks]
        files += [(owner, 0, 0) for rank in ranks for owner in placed.owners[rank]]
        files += [(rank, groups.index(group), placed.scheme.losses) for rank in ranks
                  if (group := placed.parity_group_of[rank])]  # fmt: skip
        rows = np.zeros(2 * len(files), dtype=FOUND)
        rows["rank"], rows["group"], rows["number"] = np.repeat(np.array(files), 2, axis=0).T
        rows["kind"], rows["shared_by"] = np.where(rows["number"] > 0, Kind.PARITY, Kind.SLOT), -1
        rows["generation"], rows["step"] = np.tile([[41, 410], [42, 420]], (len(files), 1)).T
        rows["node"], rows["file"], rows["world_size"] = node, np.arange(rows.size), len(topology.node_of)
        rows["run_0"], rows["run_1"] = RUN
        found.append(Inventory(rows, tuple(groups)))
    return found


def whole_inventories(topology: Topology, placed: Placement, memory: Path, live: Sequence[int]) -> list[Inventory]:
    """Give what each node holds in a job with some live ranks: their real files, and generated ones of all other ranks.

    Args:
        topology: topology of the job.
        placed: which rank protects which.
        memory: directory that contains the nodes of the live ranks.
        live: the live ranks. Each is the first of its node.
    """
    real = {}
    for node in (topology.node_of[rank] for rank in live):
        with contextlib.closing(NodeDirectory(str(memory), "scale", node)) as held:
            real[node] = scan(held, node)
    newest = max((row for part in real.values() for row in part.rows), key=lambda row: int(row["generation"]))
    # Other ranks get only the newest attempt, under file numbers that no live rank uses.
    found = []
    for node, part in enumerate(inventories(topology, placed)):
        rows = part.rows[(part.rows["generation"] == 42) & ~_of_group(part, live)]
        for name in ("generation", "run_0", "run_1", "step"):
            rows[name] = newest[name]
        rows["file"] += 5000
        made = dataclasses.replace(part, rows=rows)
        found.append(join([real[node], made]) if node in real else made)
    return found


def _of_group(part: Inventory, live: Sequence[int]) -> np.ndarray:
    return np.isin(part.rows["rank"], live)
