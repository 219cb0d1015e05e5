"""Turn a checkpoint of any number of ranks, in memory or in a directory, into a `Whole` on the rank that exports.

A `Whole` has every tensor whole. The first rank exports, and the others read for it.
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
    """The whole tensors of an open checkpoint. If ranks had different values, those of the lowest rank count.

    Args:
        world: the ranks that have it open.
        opened: the checkpoint, with the data that `dcp_plans.TOLD` names.

    Attributes:
        left_out: names of objects that exist only as a pickle. `Whole` describes the other attributes.
    """

    def __init__(self, world: Collectives, opened: OpenCheckpoint):
        self._world, self._opened = world, opened
        self.step = opened.step
        its = outline(opened)
        self._spots, self.entries, self.ties = its.spots, its.entries, its.ties
        self.tree, self.plain, self.left_out = its.tree, its.plain, its.left_out

    def bytes_of(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read tensors, each whole. The first rank calls it while the others are in `export`. Collective."""
        found = {name: np.empty(self.entries[name].nbytes, dtype=np.uint8) for name in names}
        wanted_parts = [wanted_part for name in names for wanted_part in self._parcels(name, found[name])]
        self._world.broadcast(True, 0)  # now the other ranks read, too
        if not self._opened.read(wanted_parts):
            raise CorruptSlot("parts of the checkpoint cannot be read", step=self.step)
        return found

    def export(self, write: Callable[[Source], Any]) -> Any:
        """Let the first rank export. Return its result there, and None on the others.

        Collective over the world.

        Raises:
            MlflashError, OSError: the export failed on the first rank. The other ranks raise an MlflashError.
        """
        if self._world.rank:
            while self._world.broadcast(None, 0):
                self._opened.read(())
            return self._world.raise_together(None)
        error: BaseException | None = None
        result: Any = None
        try:
            result = write(self)
        except Exception as problem:  # the other ranks must learn of it
            error = problem
        self._world.broadcast(False, 0)
        told = error if error is None or isinstance(error, MlflashError) else MlflashError(f"export failed: {error}")
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
        # If the checkpoint comes from memory, nobody has yet compared the tensors that several ranks hold whole.
        own = olds.is_private(spots) or not (olds.compared or olds.is_sharded(spots))
        first = min(int(olds.groups[group].ranks[0]) for group, _ in spots)
        parts = olds.parts(entry, first, spots, first if own else None)
        target = items(raw, entry)
        return [WantedPart(part.rank, part.number, part.source, part.shape, target[shards.box(part.target, part.shape)])
                for part in parts or ()]  # fmt: skip
