"""Which node each rank runs on, and which node replaces a lost one.

Pure: nothing here contacts a node. Ranks are numbered node by node: the ranks of seat 0 come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class NodeAssignment:
    """The nodes of a run.

    Attributes:
        hosts: the node of each seat.
        ranks_per_node: ranks on each node.
    """

    hosts: tuple[str, ...]
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return len(self.hosts) * self.ranks_per_node

    def hosts_of_ranks(self) -> Iterator[str]:
        """The node of each rank, in order of rank."""
        for host in self.hosts:
            for _ in range(self.ranks_per_node):
                yield host


def assign_nodes(hosts: Sequence[str], nodes: int, ranks_per_node: int, least: int = 0) -> NodeAssignment | None:
    """Choose the nodes of the first run.

    Args:
        hosts: nodes that are fit to train, in the order of the allocation.
        nodes: number of nodes wanted.
        ranks_per_node: ranks on each node.
        least: smallest number of nodes that is enough; 0: all that are wanted.

    Returns:
        The seats; None if there are too few nodes.
    """
    return None if len(hosts) < (least or nodes) else NodeAssignment(tuple(hosts[:nodes]), ranks_per_node)


def reassign_nodes(before: NodeAssignment, fit: Sequence[str], nodes: int, least: int = 0) -> NodeAssignment | None:
    """Choose the nodes of the next run: nodes that can stay keep their seats, and spares take the empty ones.

    If there are not enough spares, the run has fewer nodes. It grows again as soon as there are enough.

    Args:
        before: the seats of the run before.
        fit: nodes that are fit to train, in the order of the allocation. Those without a seat are spares.
        nodes: number of nodes wanted.
        least: smallest number of nodes that is enough; 0: all that are wanted.

    Returns:
        The seats; None if there are too few nodes.

    Example:
        (a, b, c) with a, c, d, e fit → (a, d, c); with a and c fit, and ``least=2`` → (a, c).
    """
    stay: Collection[str] = set(before.hosts) & set(fit)
    spares = iter([host for host in fit if host not in before.hosts])
    seats: list[str | None] = [host if host in stay else next(spares, None) for host in before.hosts]
    seats += [next(spares, None) for _ in range(nodes - len(seats))]
    taken = tuple(host for host in seats if host is not None)
    return None if len(taken) < (least or nodes) else NodeAssignment(taken, before.ranks_per_node)
