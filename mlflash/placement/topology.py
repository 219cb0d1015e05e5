"""Which node this process is on, and which rank is on which node.

Every rank computes the same topology from the same list of nodes.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple


class Node(NamedTuple):
    """What the ranks of a node have in common. Ranks with the same host and memory are on one node.

    Attributes:
        host: a name of this host since its last boot.
        memory: identity of a memory directory on this host; "" if it does not exist.
        name: of the node, in messages.
    """

    host: str
    memory: str
    name: str


def this_node(memory: str = "/dev/shm", name: str = "") -> Node:
    """Return the node of this process.

    Containers of one host may have its name and its network, and a ``/dev/shm`` each (``docker run --network host``).
    The kernel numbers each file system of memory.

    Args:
        memory: the directory that ranks of this node share.
        name: of the node; "": that of the host.
    """
    status = os.stat(memory) if os.path.isdir(memory) else None
    host = f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return Node(host, f"{status.st_dev}:{status.st_ino}" if status else "", name or socket.gethostname())


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where the ranks are."""

    node_of: tuple[int, ...]  # node index of each rank, nodes numbered by their lowest rank
    node_names: tuple[str, ...]

    @cached_property
    def ranks_on(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending; the position is the local rank."""
        ranks: list[list[int]] = [[] for _ in self.node_names]
        for rank, node in enumerate(self.node_of):
            ranks[node].append(rank)
        return tuple(tuple(r) for r in ranks)

    def name_of(self, rank: int) -> str:
        return self.node_names[self.node_of[rank]]

    def reader(self, rank: int, node: int) -> int:
        """The rank that reads a file of a rank on a node: the rank itself if it is there, or its ranks in turn."""
        ranks = self.ranks_on[node]
        return rank if rank in ranks else ranks[rank % len(ranks)]


def from_node_ids(node_ids: Sequence[tuple[int, str]]) -> Topology:
    """Build the topology from what each rank reports about its node.

    Args:
        node_ids: for each rank the lowest rank of its node, and the node's name.

    Example:
        ``[(0, "a"), (1, "b"), (0, "a"), (1, "b")]`` → ranks 0 and 2 on node 0, ranks 1 and 3 on node 1.
    """
    leaders = sorted({leader for leader, _ in node_ids})
    names = dict(node_ids)
    index = {leader: i for i, leader in enumerate(leaders)}
    return Topology(tuple(index[leader] for leader, _ in node_ids), tuple(names[leader] for leader in leaders))


def tied_together(count: int, ties: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Number the sets that ties make, by their lowest member: 4 and the ties (0, 2), (3, 1) → (0, 1, 0, 1)."""
    number = list(range(count))

    def root(member: int) -> int:
        while number[member] != member:
            number[member] = number[number[member]]
            member = number[member]
        return member

    for a, b in ties:
        a, b = root(a), root(b)
        number[max(a, b)] = min(a, b)
    return tuple(root(member) for member in range(count))
