"""Where a state goes in the slot of a rank, and in the file of its share."""

from __future__ import annotations

import dataclasses

from ..state.layout import Extents, Layout
from .deduplication import Piece, Sharing, cuts


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a state goes, and the manifest that describes it.

    Attributes:
        private: names of tensors of which each rank has its own.
        sharing: the ranks that hold some of it alike; None: nothing is shared.
        manifest_nbytes: bytes of the manifest; -1: its actual size. In a courier that is a process, the manifest itself
            is empty here: it is in the slot.
    """

    layout: Layout
    manifest: bytes
    private: frozenset[str]
    sharing: Sharing | None = None
    pieces: tuple[Piece, ...] = ()
    manifest_nbytes: int = -1

    def __post_init__(self) -> None:
        if self.manifest_nbytes < 0:
            object.__setattr__(self, "manifest_nbytes", len(self.manifest))

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
