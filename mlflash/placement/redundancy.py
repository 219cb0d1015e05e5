"""Redundancy schemes, and which rank protects which on given nodes and failure domains.

A scheme is ``none``, ``copy:k``, ``xor:n`` or ``rs:n+k``. A group of `Scheme.members` ranks on different nodes loses
nothing as long as at most `Scheme.losses` of them are lost.

Nodes are dealt to groups like cards: sorted by domain, so that the nodes of a rack or leaf switch go to as many groups
as possible, at every level of domains at once. The ranks with the same local rank in the nodes of a group form a
redundancy group. Pure: every rank computes the same answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from ..errors import ConfigError
from .topology import Topology, tied_together

MAX_LOSSES = 3
MAX_MEMBERS = 16  # if the number of nodes does not divide, groups have up to twice as many members

_FORM = re.compile(r"(none)|copy(?::(\d{1,2}))?|xor:(\d{1,3})|rs:(\d{1,3})\+(\d{1,2})")
EXPECTED = (
    f"none, copy, copy:k, xor:n (3 <= n <= {MAX_MEMBERS} nodes per group) or rs:n+k (n >= 2, 1 <= k <= {MAX_LOSSES}, "
    f"n + k <= {MAX_MEMBERS})"
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One scheme, with the numbers of a full group."""

    kind: str  # "none", "copy", "xor" or "rs"
    members: int  # ranks of a group, all on different nodes
    losses: int  # how many of them may be lost

    @property
    def parity(self) -> bool:
        return self.kind in ("xor", "rs")

    def sized(self, members: int) -> Scheme:
        return dataclasses.replace(self, members=members)

    @property
    def overhead(self) -> float:
        """Bytes of redundancy per byte of state: copy:1 → 1, xor:8 → 1/7, rs:6+2 → 1/3."""
        return self.losses / (self.members - self.losses) if self.parity else float(self.losses)

    def __str__(self) -> str:
        """The scheme as the user writes it: ``copy``, ``copy:2``, ``xor:8``, ``rs:6+2``."""
        if self.kind == "none" or (self.kind == "copy" and self.losses == 1):
            return self.kind
        if self.kind == "rs":
            return f"rs:{self.members - self.losses}+{self.losses}"
        return f"{self.kind}:{self.losses if self.kind == 'copy' else self.members}"


def parse(text: str) -> Scheme:
    """Read a scheme: ``parse("rs:6+2") == Scheme("rs", members=8, losses=2)``. Raises ConfigError if it is none."""
    form = _FORM.fullmatch(text)
    scheme = None
    if form is not None:
        none, copies, xor, data, parities = form.groups()
        if none:
            scheme = Scheme("none", 1, 0)
        elif xor:
            scheme = Scheme("xor", int(xor), 1)
        elif data:
            scheme = Scheme("rs", int(data) + int(parities), int(parities))
        else:
            scheme = Scheme("copy", 1 + int(copies or 1), int(copies or 1))
    if scheme is None or not _makes_sense(scheme):
        raise ConfigError("this is no redundancy scheme", expected=EXPECTED, found=repr(text))
    return scheme


def _makes_sense(scheme: Scheme) -> bool:
    if scheme.kind == "none":
        return True
    enough = not scheme.parity or scheme.members >= scheme.losses + 2  # with one data unit, parity is a copy
    return 1 <= scheme.losses <= MAX_LOSSES and scheme.members <= MAX_MEMBERS and enough


# Which rank protects which


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rank protects which."""

    scheme: Scheme
    # nodes that share their ranks' redundancy groups; a group of one node protects nothing
    node_groups: tuple[tuple[int, ...], ...]
    partners: tuple[tuple[int, ...], ...]  # for each rank, the ranks that hold a copy of its slot
    # ranks that hold parity of each other, ascending; each rank is in one or in none
    parity_groups: tuple[tuple[int, ...], ...]

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the ranks whose copies it holds, ascending."""
        held: list[list[int]] = [[] for _ in self.partners]
        for rank, partners in enumerate(self.partners):
            for partner in partners:
                held[partner].append(rank)
        return tuple(tuple(ranks) for ranks in held)

    @cached_property
    def parity_group_of(self) -> tuple[tuple[int, ...], ...]:
        group_of: list[tuple[int, ...]] = [() for _ in self.partners]
        for group in self.parity_groups:
            for rank in group:
                group_of[rank] = group
        return tuple(group_of)

    def inbox_of(self, rank: int) -> tuple[int, ...]:
        """The ranks whose copies a rank holds, and the rank itself if it holds parity."""
        return (*self.owners[rank], *((rank,) if self.parity_group_of[rank] else ()))

    @cached_property
    def connected(self) -> tuple[int, ...]:
        """Number the sets of ranks that exchange copies or parity: partners ((2,), (3,), (0,), (1,)) → (0, 1, 0, 1)."""
        ties = [(rank, partner) for rank, partners in enumerate(self.partners) for partner in partners]
        ties += [(group[0], rank) for group in self.parity_groups for rank in group[1:]]
        return tied_together(len(self.partners), ties)


def form_groups(domains: Sequence[tuple[str, ...]], size: int) -> tuple[tuple[int, ...], ...]:
    """Form groups of at least ``size`` nodes (or one of all, where there are fewer), as equal as can be.

    Of each failure domain a group has at most one node more than another group: no way to form so many groups
    puts fewer nodes of a domain into one.

    Args:
        domains: for each node its domains, outermost first; empty tuples where nothing is known.
        size: nodes per group.

    Example:
        8 nodes in racks AAAABBBB, size 4 → ((0, 2, 4, 6), (1, 3, 5, 7)): two of each rack.
        11 nodes, size 4 → 2 groups, of 6 and 5.
    """
    order = sorted(range(len(domains)), key=lambda node: (domains[node], node))
    groups = max(1, len(order) // size)
    return tuple(tuple(order[first::groups]) for first in range(groups))


def place(topology: Topology, scheme: Scheme, domains: Sequence[tuple[str, ...]] = (),
          recorded: Sequence[tuple[int, ...]] = ()) -> Placement:  # fmt: skip
    """Place a scheme over the nodes.

    If a group has too few nodes for parity (losses + 2), its ranks get copies instead: as many as the scheme has
    losses, or as there are other nodes. A rank whose node has more ranks than the others also gets copies.

    Args:
        domains: for each node its failure domains, outermost first; empty: nothing is known.
        recorded: parity groups of the run before. They are kept if they still make sense, so that a spare takes the
            place of a dead node and all other groups stay as they were.
    """
    nodes = len(topology.node_names)
    nothing: tuple[tuple[int, ...], ...] = ((),) * len(topology.node_of)
    if scheme.kind == "none" or nodes == 1:
        return Placement(scheme, tuple((node,) for node in range(nodes)), nothing, ())
    if recorded and (kept := _recorded(topology, scheme, recorded)) is not None:
        return kept
    node_groups = form_groups(domains or ((),) * nodes, scheme.members)
    partners: list[tuple[int, ...]] = list(nothing)
    parity_groups = []
    held = [0] * len(topology.node_of)
    for group in node_groups:
        for local in range(max(len(topology.ranks_on[node]) for node in group)):
            with_local = [node for node in group if local < len(topology.ranks_on[node])]
            ranks = [topology.ranks_on[node][local] for node in with_local]
            if scheme.parity and len(ranks) >= scheme.losses + 2:
                parity_groups.append(tuple(sorted(ranks)))
                continue
            for node, rank in zip(with_local, ranks, strict=True):
                partners[rank] = _partners(topology, group, node, local, scheme.losses, held)
    return Placement(scheme, node_groups, tuple(partners), tuple(sorted(parity_groups)))


def _partners(topology: Topology, group: Sequence[int], node: int, local: int, copies: int, held: list[int]
              ) -> tuple[int, ...]:  # fmt: skip
    """The ranks on the next nodes of the group that hold the copies of a rank.

    These are the ranks with the same local rank. On a node with fewer ranks, it is the one that holds the fewest copies
    so far.
    """
    place = group.index(node)
    partners = []
    for step in range(1, min(copies, len(group) - 1) + 1):
        ranks = topology.ranks_on[group[(place + step) % len(group)]]
        partner = ranks[local] if local < len(ranks) else min(ranks, key=lambda rank: (held[rank], rank))
        held[partner] += 1
        partners.append(partner)
    return tuple(partners)


def _recorded(topology: Topology, scheme: Scheme, recorded: Sequence[tuple[int, ...]]) -> Placement | None:
    """The placement of the run before, if each rank still is in one group, of different nodes, large enough."""
    groups = sorted({tuple(sorted(group)) for group in recorded})
    ranks = sorted(rank for group in groups for rank in group)
    if not scheme.parity or ranks != list(range(len(topology.node_of))):
        return None
    least = min(scheme.members, len(topology.node_names))
    node_groups = set()
    for group in groups:
        nodes = {topology.node_of[rank] for rank in group}
        if len(nodes) != len(group) or len(group) < max(least, scheme.losses + 2) or len(group) >= 2 * scheme.members:
            return None
        node_groups.add(tuple(sorted(nodes)))
    return Placement(scheme, tuple(sorted(node_groups)), ((),) * len(ranks), tuple(groups))


def made(placement: Placement) -> str:
    """Name what is made from a scheme: xor:4 over 11 nodes → "xor:6 and xor:5"; rs:6+2 over 3 nodes → "copy:2"."""
    parity = Counter(len(group) for group in placement.parity_groups)
    forms = [str(placement.scheme.sized(members)) for members, _ in parity.most_common()]
    copies = Counter(len(ranks) for ranks in placement.partners if ranks)
    forms += [str(Scheme("copy", 1 + count, count)) for count, _ in copies.most_common()]
    return " and ".join(forms) or "none"
