"""A checkpoint of whatever ranks, in memory or in a directory → `Whole`: every tensor whole, on the rank that exports.

That is the first one; the others read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import CorruptSlot, MlflashError
from ..protocol.ranks import Collectives
from ..protocol.wanted_parts import WantedPart, items
from ..restoring.open_in_memory import OpenCheckpoint
from ..state import shards
from .outline import outline


class Source:
    """Whole tensors of an open checkpoint. What ranks had their own of is that of the lowest rank.

    Args:
        world: the ranks that have it open.
        opened: the checkpoint, with what `dcp_plans.TOLD` names.

    Attributes:
        left_out: names of what has no form outside of its pickle; what else there is, `Whole` says.
    """

    def __init__(self, world: Collectives, opened: OpenCheckpoint):
        self._world, self._opened = world, opened
        self.step = opened.step
        its = outline(opened)
        self._spots, self.entries, self.ties = its.spots, its.entries, its.ties
        self.tree, self.plain, self.left_out = its.tree, its.plain, its.left_out

    def bytes_of(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read tensors, each whole; for the first rank, while the others are in `serve`. Collective over the world."""
        found = {name: np.empty(self.entries[name].nbytes, dtype=np.uint8) for name in names}
        wanted_parts = [wanted_part for name in names for wanted_part in self._parcels(name, found[name])]
        self._world.broadcast(True, 0)  # from here on the others read, too
        if not self._opened.read(wanted_parts):
            raise CorruptSlot("parts of the checkpoint cannot be read", step=self.step)
        return found

    def export(self, write: Callable[[Source], Any]) -> Any:
        """Have the first rank export; gives what that gives there, and None elsewhere.

        Collective over the world.

        Raises:
            MlflashError, OSError: what went wrong, on the first rank; on the others an MlflashError.
        """
        if self._world.rank:
            while self._world.broadcast(None, 0):
                self._opened.read(())
            return self._world.raise_together(None)
        error: BaseException | None = None
        result: Any = None
        try:
            result = write(self)
        except Exception as problem:  # the others must hear of it
            error = problem
        self._world.broadcast(False, 0)
        told = error if error is None or isinstance(error, MlflashError) else MlflashError(f"it failed: {error}")
        try:
            self._world.raise_together(told)
        except MlflashError:
            if error is not None:
                raise error from None
            raise
        return result

    def _parcels(self, name: str, raw: np.ndarray) -> list[WantedPart]:
        entry, spots, olds = self.entries[name], self._spots[name], self._opened.olds
        if not entry.nbytes:
            return []
        # Out of memory nobody has compared yet what several ranks hold whole.
        own = olds.is_private(spots) or not (olds.compared or olds.is_sharded(spots))
        first = min(int(olds.groups[group].ranks[0]) for group, _ in spots)
        parts = olds.parts(entry, first, spots, first if own else None)
        target = items(raw, entry)
        return [WantedPart(part.rank, part.number, part.source, part.shape, target[shards.box(part.target, part.shape)])
                for part in parts or ()]  # fmt: skip
