"""State that several ranks hold alike: stored once on each node, split over its ranks, and not sent at all.

Ranks of data-parallel training hold the same parameters (DDP), or the same shards of them (HSDP). If these are on more
nodes than the scheme may lose, they are redundancy enough. The ranks of such a set on one node are *siblings*: each
stores one *share* of what they hold alike. The files of a share are equal on all nodes.

    node 0   rank 0: share 0   rank 1: share 1
    node 1   rank 2: share 0   rank 3: share 1
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from ..memory.slot_header import MAX_GROUP
from ..placement.topology import Topology
from ..state.layout import ALIGN_NBYTES, Layout, round_up

Share = tuple[int, int]
"""A share of what a set of ranks holds alike: the lowest of these ranks, and the number of the share."""


@dataclasses.dataclass(frozen=True)
class Sharing:
    """A set of ranks that hold the same state, as one of them sees it.

    Attributes:
        ranks: all of them, ascending.
        siblings: those on this rank's node, ascending; the position in it is the number of the share.
    """

    ranks: tuple[int, ...]
    siblings: tuple[int, ...]
    rank: int

    @property
    def share(self) -> int:
        return self.siblings.index(self.rank)

    @property
    def by(self) -> int:
        """The lowest rank of the set, which identifies the set in headers."""
        return self.ranks[0]


def find(topology: Topology, ranks: Sequence[int], rank: int, losses: int) -> Sharing | None:
    """Find a rank's place among those that hold the same state; None if sharing gains nothing.

    Args:
        losses: nodes that the scheme may lose: the copies must be on more.

    Returns:
        The place. Also None if the set has different numbers of ranks on its nodes: shares must be the same everywhere.
    """
    on_node: dict[int, list[int]] = {}
    for member in sorted(set(ranks)):
        on_node.setdefault(topology.node_of[member], []).append(member)
    counts = {len(there) for there in on_node.values()}
    siblings = on_node[topology.node_of[rank]]
    if len(on_node) <= losses or len(ranks) == 1 or len(counts) > 1 or len(siblings) > MAX_GROUP:
        return None
    return Sharing(tuple(sorted(set(ranks))), tuple(siblings), rank)


def cuts(nbytes: int, shares: int) -> list[int]:
    """Where the shares of so many bytes begin and end, ``shares + 1`` numbers.

    Example:
        1000 bytes in 2 shares → [0, 512, 1024]: whole 256-byte units, as equal as can be.
    """
    units = round_up(nbytes, ALIGN_NBYTES) // ALIGN_NBYTES
    return [units * share // shares * ALIGN_NBYTES for share in range(shares + 1)]


@dataclasses.dataclass(frozen=True)
class Piece:
    """The bytes ``start`` to ``end`` of a leaf, which go to ``at`` of the payload of a share."""

    leaf: int
    start: int
    end: int
    share: int
    at: int


def pieces(layout: Layout, shares: int) -> list[Piece]:
    """Cut the shared leaves at the borders of the shares, in the order of the leaves; tied ones count once."""
    found = []
    bounds = cuts(layout.shared_nbytes, shares)
    seen = set()
    for leaf, entry in enumerate(layout.entries):
        first = entry.start - layout.extents.payload_nbytes
        if first < 0 or not entry.nbytes or entry.start in seen:
            continue
        seen.add(entry.start)
        for share, (low, high) in enumerate(itertools.pairwise(bounds)):
            start, end = max(first, low), min(first + entry.nbytes, high)
            if start < end:
                found.append(Piece(leaf, start - first, end - first, share, start - low))
    return found
