"""Ranks and their nodes → who protects whom, and what that survives.

Pure: every rank computes the same answer from the same list of nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where the ranks are.

    Args:
        node_of: node index of each rank, nodes numbered by their lowest rank.
        node_names: name of each node.
    """

    node_of: tuple[int, ...]
    node_names: tuple[str, ...]

    @cached_property
    def ranks_on(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending; the position is the local rank."""
        ranks: list[list[int]] = [[] for _ in self.node_names]
        for rank, node in enumerate(self.node_of):
            ranks[node].append(rank)
        return tuple(tuple(r) for r in ranks)

    def name_of(self, rank: int) -> str:
        """Name of the node of a rank."""
        return self.node_names[self.node_of[rank]]


def from_node_ids(node_ids: Sequence[tuple[int, str]]) -> Topology:
    """Build the topology from what each rank says of its node.

    Args:
        node_ids: for each rank the lowest rank of its node, and the node's name.

    Example:
        ``[(0, "a"), (1, "b"), (0, "a"), (1, "b")]`` → ranks 0 and 2 on node 0, ranks 1 and 3 on node 1.
    """
    leaders = sorted({leader for leader, _ in node_ids})
    names = dict(node_ids)
    index = {leader: i for i, leader in enumerate(leaders)}
    return Topology(tuple(index[leader] for leader, _ in node_ids), tuple(names[leader] for leader in leaders))


def partner_nodes(nodes: int) -> tuple[int, ...]:
    """Give each node the node that holds its copies.

    Pairs survive more pairs of losses than a ring, so nodes are paired, half the machine apart (neighbours
    share a chassis and a switch); of an odd number the last three form a ring. One node has no partner (-1).

    Example:
        4 nodes → (2, 3, 0, 1); 5 nodes → (1, 0, 3, 4, 2); 3 nodes → (1, 2, 0).
    """
    if nodes == 1:
        return (-1,)
    paired = nodes if nodes % 2 == 0 else nodes - 3
    half = paired // 2
    ring = range(paired, nodes)
    return tuple((i + half) % paired for i in range(paired)) + tuple(paired + (i - paired + 1) % 3 for i in ring)


def partners(topology: Topology) -> tuple[int, ...]:
    """Give each rank the rank that holds its copy, on the partner node; -1 where there is no other node.

    It is the rank with the same local rank; where the partner node has fewer ranks, the one there that holds
    the fewest copies so far.

    Example:
        Ranks 0-2 on node 0, rank 3 on node 1: partners (3, 3, 3, 0).
    """
    node_partner = partner_nodes(len(topology.node_names))
    held = [0] * len(topology.node_of)
    found = [-1] * len(topology.node_of)
    for local in range(max(len(ranks) for ranks in topology.ranks_on)):
        for node, ranks in enumerate(topology.ranks_on):
            if node_partner[node] < 0 or local >= len(ranks):
                continue
            there = topology.ranks_on[node_partner[node]]
            target = there[local] if local < len(there) else min(there, key=lambda r: (held[r], r))
            found[ranks[local]] = target
            held[target] += 1
    return tuple(found)


def owners(partner_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Turn partners round: for each rank the ranks whose copies it holds, ascending."""
    held: list[list[int]] = [[] for _ in partner_of]
    for rank, partner in enumerate(partner_of):
        if partner >= 0:
            held[partner].append(rank)
    return tuple(tuple(ranks) for ranks in held)


def groups(partner_of: Sequence[int]) -> tuple[int, ...]:
    """Number the redundancy groups: ranks tied together by partnership have the same number.

    Example:
        Partners (2, 3, 0, 1) → groups (0, 1, 0, 1).
    """
    group = list(range(len(partner_of)))

    def root(rank: int) -> int:
        while group[rank] != rank:
            group[rank] = group[group[rank]]
            rank = group[rank]
        return rank

    for rank, partner in enumerate(partner_of):
        if partner >= 0:
            a, b = root(rank), root(partner)
            group[max(a, b)] = min(a, b)
    return tuple(root(rank) for rank in range(len(partner_of)))


def survives(topology: Topology, scheme: str) -> str:
    """Say in one line what may die without a committed step being lost."""
    nodes = len(topology.node_names)
    if scheme == "none":
        return "any process; no node (redundancy is 'none')"
    if nodes == 1:
        return "any process; no node (there is only one node, so no copies are made)"
    if nodes == 2:
        return "any process; any 1 of 2 nodes"
    pairs = {frozenset((i, p)) for i, p in enumerate(partner_nodes(nodes))}
    total = nodes * (nodes - 1) // 2
    return f"any process; any 1 of {nodes} nodes; {total - len(pairs)} of {total} pairs of nodes"
