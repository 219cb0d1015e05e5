"""State that several ranks hold alike: stored once on each node, split over its ranks, and not sent at all.

Ranks of data-parallel training hold the same parameters (DDP), or the same shards of them (HSDP). If these are on more
nodes than the scheme may lose, they are redundancy enough. The ranks of such a set on one node are *siblings*: each
stores one *share* of what they hold alike. The files of a share are equal on all nodes.

    node 0   rank 0: share 0   rank 1: share 1
    node 1   rank 2: share 0   rank 3: share 1
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import xxhash

from ..memory.slot import MAX_GROUP, Slot
from ..placement.topology import Topology
from ..state.layout import ALIGN_NBYTES, Extents, Layout, round_up
from ..state.leaves import Entry, Flat, live_bytes, replica_ranks

Share = tuple[int, int]
"""A share of what a set of ranks holds alike: the lowest of these ranks, and the number of the share."""


@dataclasses.dataclass(frozen=True)
class Sharing:
    """A set of ranks that hold the same state, as one of them sees it."""

    ranks: tuple[int, ...]  # all of them, ascending
    siblings: tuple[int, ...]  # those on this rank's node, ascending; the position in it is the number of the share
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
    counts = {len(members) for members in on_node.values()}
    siblings = on_node[topology.node_of[rank]]
    if len(on_node) <= losses or len(ranks) == 1 or len(counts) > 1 or len(siblings) > MAX_GROUP:
        return None
    return Sharing(tuple(sorted(set(ranks))), tuple(siblings), rank)


def cuts(nbytes: int, shares: int) -> list[int]:
    """Where the shares of so many bytes begin and end, in units of 256 bytes: 1000 in 2 shares → [0, 512, 1024]."""
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
    cut = []
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
                cut.append(Piece(leaf, start - first, end - first, share, start - low))
    return cut


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a state goes, and the manifest that describes it."""

    layout: Layout
    manifest: bytes
    private: frozenset[str]  # names of tensors of which each rank has its own
    sharing: Sharing | None = None  # the ranks that hold some of it alike; None: nothing is shared
    pieces: tuple[Piece, ...] = ()
    manifest_nbytes: int = -1  # -1: its actual size. In the courier the manifest is empty here: it is in the slot

    def __post_init__(self) -> None:
        if self.manifest_nbytes < 0:
            object.__setattr__(self, "manifest_nbytes", len(self.manifest))

    def __reduce__(self) -> tuple[object, ...]:
        return Plan, (self.layout, b"", self.private, self.sharing, self.pieces, self.manifest_nbytes)

    @property
    def nbytes(self) -> int:
        share = self.share_extents
        return self.layout.extents.nbytes + (0 if share is None else share.nbytes)

    @property
    def share_extents(self) -> Extents | None:
        """Of the file of this rank's share; None: nothing is shared."""
        if self.sharing is None:
            return None
        low, high = cuts(self.layout.shared_nbytes, len(self.sharing.siblings))[self.sharing.share :][:2]
        return Extents(0, high - low, self.layout.extents.block_nbytes)


# What other ranks may hold alike of a state, as plain data: comparing it with theirs needs no tensor


FromTorch = Callable[[Iterable[int]], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ShareableLeaf:
    """A leaf that has bytes of its own, and is not private to its rank."""

    key: int  # the same on all ranks that have the same shard of a tensor of this name; see `key_of`
    name: str
    # for a DTensor, the ranks that hold the same shard by its placements; otherwise None
    replicas: tuple[int, ...] | None


class Shareable(Protocol):
    """The courier's questions about a state that ranks may share. Nothing here is collective."""

    def shareable(self) -> list[ShareableLeaf]:
        """List what other ranks may hold alike in a state that is not settled yet; the trainer does not change it."""

    def digests(self, keys: Collection[int]) -> dict[int, int]:
        """Make checksums of some of these leaves, by key."""


@dataclasses.dataclass(frozen=True)
class SharingNews:
    """What ranks share, as far as they have agreed on it."""

    sharing: Sharing | None = None  # the ranks that share; None: each rank stores all of its own
    agreed: frozenset[int] = frozenset()  # keys of the leaves that they hold alike; see `key_of`
    version: int = 0  # grows when less is shared than before


def shareable(flat: Flat, from_torch: FromTorch) -> list[ShareableLeaf]:
    """List the leaves of a state that other ranks may hold alike."""
    return [
        ShareableLeaf(
            key_of(leaf.entry), leaf.entry.name, None if leaf.whole is None else from_torch(replica_ranks(leaf.whole))
        )
        for leaf in flat.leaves
        if leaf.tie < 0 and leaf.entry.nbytes and leaf.entry.name not in flat.structure.private
    ]  # fmt: skip


def digests(flat: Flat, keys: Collection[int]) -> dict[int, int]:
    """Make a checksum of each leaf with one of some keys, as they are now. Not collective; it reads all their bytes."""
    return {
        key: xxhash.xxh3_64_intdigest(live_bytes(leaf.value).data)
        for leaf in flat.leaves
        if leaf.tie < 0 and (key := key_of(leaf.entry)) in keys
    }


def replica_nbytes(flat: Flat | None, from_torch: FromTorch) -> dict[tuple[int, ...], int]:
    """Count the bytes of DTensors by the ranks that hold the same of them."""
    nbytes: collections.Counter[tuple[int, ...]] = collections.Counter()
    for leaf in flat.leaves if flat is not None else ():
        if leaf.whole is not None and leaf.tie < 0:
            nbytes[from_torch(replica_ranks(leaf.whole))] += leaf.entry.nbytes
    return dict(nbytes)


def key_of(entry: Entry) -> int:
    """Return the key of a shard of a tensor, made from its name, type, shape and place in the whole."""
    same = (entry.name, entry.kind, entry.dtype, entry.global_shape, entry.offset, entry.shape)
    return xxhash.xxh3_64_intdigest(repr(same).encode())


def own_pieces(planned: Plan, share: Slot) -> list[tuple[Piece, np.ndarray]]:
    """The pieces that go into this rank's share, and where they go."""
    assert planned.sharing is not None and planned.share_extents is not None
    payload, number = share.payload(planned.share_extents), planned.sharing.share
    return [(p, payload[p.at : p.at + p.end - p.start]) for p in planned.pieces if p.share == number]


def all_checks(planned: Plan, share: Slot, others: dict[Piece, int]) -> dict[int, int]:
    """One number for the bytes of each shared leaf; ``others``: checksums of the pieces of other shares."""
    known = {p: xxhash.xxh3_64_intdigest(room.data) for p, room in own_pieces(planned, share)}
    every = others | known
    of_leaf: dict[int, list[int]] = {}
    for piece in planned.pieces:
        of_leaf.setdefault(piece.leaf, []).append(every[piece])
    return {leaf: xxhash.xxh3_64_intdigest(np.array(checks, dtype="<u8").tobytes()) for leaf, checks in of_leaf.items()}
