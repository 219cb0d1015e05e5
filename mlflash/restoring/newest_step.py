"""Which step a run goes on from: the newest of which every byte is good, of memory and of the directory.

Headers say what was saved, not what can be loaded. Whoever chooses a step asks here, so that a step that is damaged
beyond repair is passed over once, and not met again by the load and by each relaunch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from ..draining.checkpoint_directory import Listed
from ..errors import CorruptSlot, StepNotFound, Unrestorable, WorldSizeChanged
from ..mpi.courier import Courier
from ..redundancy.rank_checkpoint import RankCheckpoint
from ..startup.context import Context
from .open_in_directory import OpenInDirectory
from .open_in_memory import FoundElsewhere

log = logging.getLogger("mlflash")

Found = RankCheckpoint | FoundElsewhere | OpenInDirectory | None


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A checkpoint of this rank that was found and verified, for a load that comes at once.

    Attributes:
        home: it.
        asked: the step that was asked for; None: the newest.
        generation: of the newest attempt when it was found: a save since may have written over it.
    """

    home: RankCheckpoint
    asked: int | None
    generation: int


class Newest:
    """Finds steps of which every byte is verified, and remembers that until the load that comes next.

    Args:
        context: this rank's slots and communicators.
        courier: does all that is collective.
        find: chooses a checkpoint, by its headers in the directory: `Restores._find`.
        find_whole: the same, with every byte verified.
        steps_alike: lists the steps that as many ranks have saved, by their headers.
    """

    def __init__(self, context: Context, courier: Courier, find: Callable[..., Found], find_whole: Callable[..., Found],
                 steps_alike: Callable[[], list[int]]):  # fmt: skip
        self._context, self._courier = context, courier
        self._find, self._find_whole, self._steps_alike = find, find_whole, steps_alike
        self._checked: _Checked | None = None
        self._whole: set[Listed] = set()  # of the directory

    def step(self) -> int | None:
        """Find the newest step that can be loaded; see `Adapting.newest_step`."""
        return self._note(self._find_whole(None, others=True), None)

    def step_alike(self) -> int | None:
        """Find the largest step that can be loaded on as many ranks as have saved it; see `Adapting.newest_alike`."""
        reasons: dict[int, str] = {}
        for step in reversed(self._steps_alike()):
            why = self.why_not(step)
            if why is None:
                return step
            reasons[step] = why
        if reasons:
            raise Unrestorable(
                "checkpoints of as many ranks are there, and none of them can be loaded", reasons=reasons
            )
        self._close(self._find(None, others=True, checked=False))  # raises where what is there cannot be used
        return None

    def why_not(self, step: int) -> str | None:
        """Say why a step cannot be loaded on as many ranks as have saved it; None where it can.

        Collective over the world. What is lost or damaged is made again.
        """
        try:
            found = self._note(self._find_whole(step), step)
        except (CorruptSlot, StepNotFound, WorldSizeChanged) as error:  # the same on all ranks
            if self._context.world.rank == 0:
                log.warning("step %d cannot be loaded: %s", step, error)
            return str(error)
        return "there is nothing of it" if found is None else None

    def verify(self, drained: OpenInDirectory) -> None:
        """Read every byte of a checkpoint in the directory, once. Collective over the world.

        Raises:
            CorruptSlot: on all ranks, where something is damaged.
        """
        if drained.listed not in self._whole:
            self._courier.call(drained.verify_together)
            self._whole.add(drained.listed)

    def take(self, step: int | None) -> RankCheckpoint | None:
        """Take what was verified just now, to be loaded; None where it is something else, or may have changed since.

        Collective over the world.
        """
        checked, self._checked = self._checked, None
        if checked is None:  # on all ranks
            return None
        home, context = checked.home, self._context
        same = checked.asked is None if step is None else step == home.header.step
        same = same and checked.generation == context.generation and any(home.slot is own for own in context.pool.own)
        if self._courier.call(lambda: context.world.agree([int(same)]))[0]:
            return home
        self._close(home)
        return None

    def _note(self, found: Found, asked: int | None) -> int | None:
        if isinstance(found, RankCheckpoint):
            self._checked = _Checked(found, asked, self._context.generation)
            return found.header.step
        self._close(found)
        return None if found is None else found.step

    def _close(self, found: Found) -> None:
        if isinstance(found, OpenInDirectory):
            found.close()
        elif found is not None:
            for home in [found] if isinstance(found, RankCheckpoint) else found.homes.values():
                self._context.pool.unmap_others([home.slot, *home.shares])
