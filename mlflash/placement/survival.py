"""What a placement survives: computed from which rank protects which, never from the name of the scheme.

Each redundancy group is a limit: of these nodes at most so many may be lost. A loss is survived if it breaks no limit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from ..text import listed
from .redundancy import Placement
from .topology import Topology, tied_together

_ENUMERATED = 20  # if limits differ, all subsets of so many connected nodes are counted
_NAMED = 3  # fatal combinations that are named


@dataclasses.dataclass(frozen=True)
class Limit:
    """Of these nodes, at most ``losses`` may be lost."""

    nodes: frozenset[int]
    losses: int


@dataclasses.dataclass(frozen=True)
class Survival:
    """What may be lost."""

    nodes: int
    limits: frozenset[Limit]  # the redundancy groups; a loss that breaks none is survived

    def survives(self, lost: Iterable[int]) -> bool:
        """Whether every rank's slot is still there, or can be rebuilt, once these nodes are lost."""
        gone = frozenset(lost)
        return all(len(gone & limit.nodes) <= limit.losses for node in gone for limit in self._limits_on[node])

    @cached_property
    def _limits_on(self) -> tuple[tuple[Limit, ...], ...]:
        """The limits that each node is in: the others cannot be broken by its loss."""
        limits_on: list[list[Limit]] = [[] for _ in range(self.nodes)]
        for limit in self.limits:
            for node in limit.nodes:
                limits_on[node].append(limit)
        return tuple(tuple(limits) for limits in limits_on)

    @property
    def any_nodes(self) -> int:
        """The largest number of nodes of which any may be lost."""
        return min((limit.losses for limit in self.limits), default=0)

    def surviving(self, most: int) -> list[int]:
        """Count the sets of 0, 1, ... ``most`` nodes that may be lost: exact, as a product over groups.

        If more than 20 nodes are tied together by different limits, the strictest limit is used for all of them. Then
        the count is too low, never too high.

        Example:
            4 nodes in pairs, one of each may be lost: [1, 4, 4], of 1, 4 and 6 sets.
        """
        counts = [1]
        for nodes, limits in _components(self.nodes, self.limits):
            counts = np.convolve(np.array(counts, dtype=object), _component_counts(nodes, limits))[: most + 1].tolist()
        return [int(count) for count in counts] + [0] * (most + 1 - len(counts))


def of(topology: Topology, placement: Placement, shares: Mapping[int, tuple[int, int]] | None = None) -> Survival:
    """What a placement survives. Pure.

    Args:
        shares: for each rank that shares state, the set and the number of its share: one node of the set has to stay.
    """
    node_of = topology.node_of
    # Collect sets of nodes first: ranks on the same nodes have the same set.
    in_parity = {frozenset(node_of[rank] for rank in group) for group in placement.parity_groups}
    limits = {Limit(nodes, placement.scheme.losses) for nodes in in_parity}
    copied = {
        frozenset(node_of[r] for r in (rank, *partners))
        for rank, partners in enumerate(placement.partners)
        if not placement.parity_group_of[rank]
    }
    limits |= {Limit(nodes, len(nodes) - 1) for nodes in copied}
    sharing: dict[int, set[int]] = {}
    for rank, (by, _) in (shares or {}).items():
        sharing.setdefault(by, set()).add(node_of[rank])
    for nodes in set(map(frozenset, sharing.values())):
        if not any(limit.nodes <= nodes for limit in limits):  # a limit within these nodes would be exceeded before
            limits.add(Limit(nodes, len(nodes) - 1))
    return Survival(len(topology.node_names), frozenset(limits))


def _components(nodes: int, limits: Iterable[Limit]) -> list[tuple[list[int], list[Limit]]]:
    number = tied_together(nodes, ((min(limit.nodes), node) for limit in limits for node in limit.nodes))
    components: dict[int, tuple[list[int], list[Limit]]] = {}
    for node in range(nodes):
        components.setdefault(number[node], ([], []))[0].append(node)
    for limit in limits:
        components[number[min(limit.nodes)]][1].append(limit)
    return list(components.values())


def _component_counts(nodes: Sequence[int], limits: Sequence[Limit]) -> np.ndarray:
    """For 0, 1, 2 ... nodes, how many sets of so many of these nodes break no limit."""
    size = len(nodes)
    is_one_limit = len(limits) == 1 and len(limits[0].nodes) == size
    if not limits or is_one_limit or size > _ENUMERATED:
        most = min((limit.losses for limit in limits), default=size)
        return np.array([math.comb(size, lost) if lost <= most else 0 for lost in range(size + 1)], dtype=object)
    lost = (
        np.arange(1 << size, dtype=np.uint32)[:, None] >> np.arange(size, dtype=np.uint32) & 1 > 0
    )  # all sets of these nodes
    good = np.ones(1 << size, dtype=bool)
    for limit in limits:
        good &= lost[:, [nodes.index(node) for node in limit.nodes]].sum(axis=1) <= limit.losses
    return np.bincount(lost[good].sum(axis=1), minlength=size + 1).astype(object)


# In words


def describe(survival: Survival, domains: Mapping[str, Sequence[str]] | None = None) -> str:
    """Say in one line what may die without a committed step being lost.

    Args:
        domains: for each kind of failure domain ("rack"), the name of each node's domain.

    Example:
        "any process; any 1 of 4 nodes; 4 of 6 pairs of nodes; any 1 rack; not: racks A and B together"
    """
    nodes, most = survival.nodes, survival.any_nodes
    if nodes == 1:
        return "any process; no node (there is only one)"
    if most == 0:
        return "any process; no node (redundancy is 'none')"
    text = [f"any process; any {most} of {nodes} nodes"]
    more = most + 1
    if more < nodes and (good := survival.surviving(more)[more]):
        text.append(f"{good:,} of {math.comb(nodes, more):,} {_SETS.get(more, f'sets of {more}')} of nodes")
    for kind, names in (domains or {}).items():
        text += _describe_domains(survival, kind, names)
    return "; ".join(text)


_SETS = {2: "pairs", 3: "triples"}


def _describe_domains(survival: Survival, kind: str, names: Sequence[str]) -> list[str]:
    members: dict[str, list[int]] = {}
    for node, name in enumerate(names):
        members.setdefault(name, []).append(node)
    if not 1 < len(members) < survival.nodes:
        return []  # one domain in all, or one for each node: this adds nothing
    fatal = {name for (name,) in _crowded(survival.limits, names, 1)}
    if fatal:
        but = listed([f"{kind} {name}" for name in members if name in fatal], _NAMED)
        return [f"not: {but}" if len(fatal) == len(members) else
                f"any 1 of {len(members)} {_plural(kind)} except {but}"]  # fmt: skip
    text = [f"any 1 {kind}"]
    # If two domains are fatal only together, both have nodes in one group. So no other pairs have to be checked.
    bad = _crowded(survival.limits, names, 2)
    if not bad:
        return [f"any 2 {_plural(kind)}"]
    pairs = math.comb(len(members), 2)
    if len(bad) < pairs:
        text.append(f"{pairs - len(bad):,} of {pairs:,} pairs of {_plural(kind)}")
    place = {name: nth for nth, name in enumerate(members)}
    named = sorted(bad, key=lambda pair: (place[pair[0]], place[pair[1]]))
    return [*text, f"not: {listed([f'{_plural(kind)} {a} and {b} together' for a, b in named], _NAMED)}"]


def any_domain(survival: Survival, names: Sequence[str]) -> bool:
    """Whether any one failure domain may be lost; ``names`` has the domain of each node."""
    return not _crowded(survival.limits, names, 1)


def _crowded(limits: Iterable[Limit], names: Sequence[str], together: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """Find the sets of so many domains that hold more nodes of a redundancy group than it may lose.

    Returns:
        For each such set, beginning with the domain of the lowest node: the most nodes of a group, and how many may be
        lost.
    """
    first: dict[str, int] = {}
    for node, name in enumerate(names):
        first.setdefault(name, node)
    worst: dict[tuple[str, ...], tuple[int, int]] = {}
    for limit in limits:
        counts = Counter(names[node] for node in limit.nodes)
        for some in itertools.combinations(sorted(counts, key=first.__getitem__), together):
            count = sum(counts[name] for name in some)
            if count > limit.losses:
                worst[some] = max(worst.get(some, (0, 0)), (count, limit.losses))
    return worst


def _plural(kind: str) -> str:
    return kind + ("es" if kind.endswith("ch") else "s")


def too_close(topology: Topology, placement: Placement, domains: Mapping[str, Sequence[str]]) -> list[str]:
    """Name the domains that hold too many nodes of a group: ["rack A holds 3 nodes of a group that may lose 1"]."""
    texts = []
    limits = of(topology, placement).limits
    for kind, names in domains.items():
        if not 1 < len(set(names)) < len(names):
            continue
        worst = _crowded((limit for limit in limits if len(limit.nodes) > 1), names, 1)
        texts += [
            f"{kind} {name} holds {count} nodes of a group that may lose {losses}"
            for (name,), (count, losses) in sorted(worst.items())
        ]
    return texts
