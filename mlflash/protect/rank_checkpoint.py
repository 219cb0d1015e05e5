"""One rank's checkpoint for reading: its slot, and the shares of what it holds like other ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from ..memory.slot import Header, Slot
from ..state.leaves import Entry
from ..state.manifest import Manifest
from ..state.rebuild import Read
from .deduplication import Share, cuts

ShareFiles = dict[tuple[int, Share], int]
"""By node and share, the number of its file there."""


@dataclasses.dataclass
class RankCheckpoint:
    """One rank's checkpoint for reading: its slot, and the shares of what it holds like others."""

    slot: Slot  # verified
    manifest: Manifest
    shares: list[Slot]  # files of this node, verified; empty if nothing is shared
    files: ShareFiles  # where the shares of all nodes are

    @property
    def header(self) -> Header:
        assert self.slot.header is not None
        return self.slot.header

    def reader(self) -> Read:
        """Return the bytes of entries: views, or copies if shares are cut; use them only while the files are open."""
        own, shared = self.slot.reader(), self.manifest.shared
        if shared is None:
            return own
        behind = self.header.extents.payload_nbytes
        bounds = cuts(shared.nbytes, shared.shares)
        shares = [(share, share.header.extents) for share in self.shares if share.header is not None]

        def read(entry: Entry) -> np.ndarray:
            first, last = entry.start - behind, entry.start - behind + entry.nbytes
            if first < 0 or not entry.nbytes:
                return own(entry)
            parts = [
                share.part(extents, max(first, low) - low, min(last, high) - low)
                for (share, extents), (low, high) in zip(shares, itertools.pairwise(bounds), strict=True)
                if max(first, low) < min(last, high)
            ]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return read


def open_rank_checkpoint(open_file: Callable[[int], Slot], node: int, slot: Slot, files: ShareFiles) -> RankCheckpoint:
    """Combine a slot and its shares on this node, for reading; the caller unmaps them."""
    home = RankCheckpoint(slot, slot.manifest(), [], files)
    shared = home.manifest.shared
    for number in range(0 if shared is None else shared.shares):
        assert shared is not None
        home.shares.append(open_file(files[node, (shared.by, number)]))
    return home
