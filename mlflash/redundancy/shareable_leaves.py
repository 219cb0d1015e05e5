"""What other ranks may hold alike of a state, as plain data: comparing it with theirs needs no tensor."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import xxhash

from ..state.leaves import Entry, Flat, live_bytes, replica_ranks
from .deduplication import Sharing

FromTorch = Callable[[Iterable[int]], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ShareableLeaf:
    """A leaf that has bytes of its own, and is not private to its rank.

    Attributes:
        key: the same on all ranks that have the same shard of a tensor of this name; see `key_of`.
        replicas: for a DTensor, the ranks that hold the same shard by its placements; otherwise None.
    """

    key: int
    name: str
    replicas: tuple[int, ...] | None


class Shareable(Protocol):
    """The courier's questions about a state that ranks may share. Nothing here is collective."""

    def shareable(self) -> list[ShareableLeaf]:
        """List what other ranks may hold alike in a state that is not settled yet; the trainer does not change it."""

    def digests(self, keys: Collection[int]) -> dict[int, int]:
        """Make checksums of some of these leaves, by key."""


@dataclasses.dataclass(frozen=True)
class SharingNews:
    """What ranks share, as far as they have agreed on it.

    Attributes:
        sharing: the ranks that share; None: each rank stores all of its own.
        agreed: keys of the leaves that they hold alike; see `shareable_leaves.key_of`.
        version: grows when less is shared than before.
    """

    sharing: Sharing | None = None
    agreed: frozenset[int] = frozenset()
    version: int = 0


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
