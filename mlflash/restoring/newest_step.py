"""The step that a run continues from: the newest one, in memory and in the directory, of which every byte is good.

Headers say what was saved, not what can be loaded. Whoever chooses a step asks here, so that a step that is damaged
beyond repair is passed over once, and neither the load nor a relaunch meets it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..draining.checkpoint_directory import Listed
from ..errors import CorruptSlot, StepNotFound, Unrestorable, WorldSizeChanged
from ..memory.wanted_step import NEWEST, WantedStep
from ..protocol.trainer_context import TrainerContext
from ..redundancy.rank_checkpoint import RankCheckpoint
from .found import FoundElsewhere
from .open_in_directory import OpenInDirectory

log = logging.getLogger("mlflash")

Found = RankCheckpoint | FoundElsewhere | OpenInDirectory | None


class Newest:
    """Finds steps of which every byte is verified; the courier remembers the result until the next load.

    Args:
        trainer: this rank's slots, and its courier.
        find_whole: chooses a checkpoint of which every byte is verified, and remembers it: `Restores._find_whole`.
        look: raises if the existing checkpoints cannot be used.
        steps_alike: lists the steps that the same number of ranks has saved, by their headers.
    """

    def __init__(self, trainer: TrainerContext, find_whole: Callable[..., Found], look: Callable[[], Found],
                 steps_alike: Callable[[], list[int]]):  # fmt: skip
        self._trainer, self._find_whole, self._look, self._steps_alike = trainer, find_whole, look, steps_alike
        self._whole: set[Listed] = set()  # verified checkpoints of the directory

    def step(self) -> int | None:
        """Find the newest step that can be loaded; see `Adapting.newest_step`."""
        return self._close(self._find_whole(NEWEST, others=True))

    def step_alike(self) -> int | None:
        """Find the largest step that the number of ranks that saved it can load; see `Adapting.newest_alike`."""
        reasons: dict[int, str] = {}
        for step in reversed(self._steps_alike()):
            why = self.why_not(step)
            if why is None:
                return step
            reasons[step] = why
        if reasons:
            raise Unrestorable(
                "there are checkpoints of this number of ranks, but none of them can be loaded", reasons=reasons
            )
        self._close(self._look())
        return None

    def why_not(self, step: int) -> str | None:
        """Return why a step cannot be loaded on the number of ranks that saved it; None if it can.

        Collective over the world. What is lost or damaged is made again.
        """
        try:
            found = self._close(self._find_whole(WantedStep(step)))
        except (CorruptSlot, StepNotFound, WorldSizeChanged) as error:  # the same on all ranks
            if self._trainer.ranks.rank == 0:
                log.warning("step %d cannot be loaded: %s", step, error)
            return str(error)
        return "it does not exist" if found is None else None

    def verify(self, drained: OpenInDirectory) -> None:
        """Read every byte of a checkpoint in the directory, once. Collective over the world.

        Raises:
            CorruptSlot: on all ranks, if something is damaged.
        """
        if drained.listed not in self._whole:
            drained.verify_together()
            self._whole.add(drained.listed)

    def _close(self, found: Found) -> int | None:
        """Return the step of what was found; the courier remembers the rest."""
        if isinstance(found, OpenInDirectory):
            found.close()
        elif found is not None:
            for home in [found] if isinstance(found, RankCheckpoint) else found.homes.values():
                self._trainer.slots.unmap_others([home.slot, *home.shares])
        if isinstance(found, RankCheckpoint):
            return found.header.step
        return None if found is None else found.step
