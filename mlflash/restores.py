"""The restores of this run: found, brought home, loaded together, and healed behind.

What goes wrong on any rank is raised on all of them, so that no rank trains on from another step than the others.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from . import reshard, restore
from .courier import Courier, Job
from .errors import CorruptSlot, MemoryTooSmall, MlflashError, StateError, StructureMismatch
from .opened import Elsewhere, Opened
from .parcels import Parcel
from .parts import Parts
from .points import reach
from .rebuild import fill, materialize, refuse_differences
from .reunion import Home
from .saves import Saves
from .slot import Slot
from .state import flatten_or_none

log = logging.getLogger("mlflash")


class Restores:
    """Fills states with what memory holds.

    Args:
        parts: this rank's slots and communicators.
        courier: does all that is collective.
        saves: told of the step that was restored.
        seconds: seconds per verb, added to.
    """

    def __init__(self, parts: Parts, courier: Courier, saves: Saves, seconds: dict[str, float]):
        self._parts, self._courier, self._saves, self._seconds = parts, courier, saves, seconds
        self._world = parts.world

    def restore(self, state: Any, step: int | None) -> int | None:
        """Fill a state in place; see `Checkpointer.restore`."""
        self._saves.await_begun()
        placed = flatten_or_none(state) if "torch.distributed.tensor" in sys.modules else None
        self._courier.call(lambda: self._parts.find_replicas(placed))
        found = self._find(step, others=True)
        if found is None:
            self._prepare_or_warn(state)
            return None
        if isinstance(found, Home):
            home = found
            found = self._courier.call(lambda: reshard.unless_alike(self._parts, home, state))
            if isinstance(found, Elsewhere):
                self._heal_first(home)
        if isinstance(found, Elsewhere):
            return self._put_together(found, state)
        start = time.perf_counter()
        manifest, read = home.manifest, home.reader()
        self._together(home.header.step, lambda: refuse_differences(state, manifest.tree, manifest.entries))
        reach("restore.loading")
        self._together(home.header.step, lambda: fill(state, manifest.tree, manifest.entries, manifest.plain, read))
        self._seconds["load"] += time.perf_counter() - start
        return self._restored(home)

    def load(self, step: int | None) -> tuple[int | None, Any]:
        """Give the state anew; see `Checkpointer.load`."""
        home = self._find(step)
        if not isinstance(home, Home):
            return None, None
        reach("restore.loading")
        manifest = home.manifest
        state = materialize(manifest.tree, manifest.entries, manifest.plain, home.reader())
        return self._restored(home), state

    def open(self, step: int | None, told: Collection[str]) -> Opened | None:
        """Open a checkpoint to read any part of it; see `Checkpointer.open`."""
        found = self._find(step, others=True)
        if found is None:
            return None
        if isinstance(found, Home):
            home = found
            self._heal_first(home)
            found = Elsewhere(home.header.attempt, home.header.step, self._parts.restores,
                              {self._world.rank: home}, home.files, same_ranks=True)  # fmt: skip
        elsewhere = found
        opened: Opened = self._courier.call(lambda: Opened(self._parts, elsewhere, told=told))
        return opened

    def read(self, opened: Opened, wanted: Callable[[], Iterable[Parcel]], done: Callable[[], None]) -> None:
        """Read out of an opened checkpoint and close it; see `Checkpointer.read`."""
        start, step = time.perf_counter(), opened.found.step
        parcels: list[Parcel] = []
        try:
            self._together(step, lambda: parcels.extend(wanted()))
            whole = self._courier.call(lambda: opened.read(parcels))
            self._together(step, lambda: _finish(whole, done))
        finally:
            opened.close()
        self._seconds["load"] += time.perf_counter() - start
        home = opened.found.homes.get(self._world.rank)
        if opened.found.same_ranks and home is not None:
            self._restored(home)
            return
        self._saves.last_step = step
        self._parts.counts["restores"] += 1

    def steps(self) -> list[int]:
        """List the steps that can be restored; see `Checkpointer.steps`."""
        self._saves.wait()
        steps: list[int] = self._courier.call(lambda: restore.restorable_steps(self._parts))
        return steps

    def _prepare_or_warn(self, state: Any) -> None:
        try:
            self._saves.prepare(state)
        except (MemoryTooSmall, StateError) as error:  # training may begin; each save will say so again
            if self._world.rank == 0:
                log.warning("the slots could not be made: %s", error)

    def _put_together(self, old: Elsewhere, state: Any) -> int:
        """Restore what was saved by other ranks, or in other shards."""
        start = time.perf_counter()
        made: reshard.Resharded = self._courier.call(lambda: reshard.reshard(self._parts, old, state))
        reach("restore.loading")
        try:
            self._together(old.step, lambda: made.load(state))
        except MlflashError:
            reshard.give_up(self._parts, old, made)
            raise
        self._seconds["load"] += time.perf_counter() - start
        reach("restore.loaded")
        self._courier.call(lambda: reshard.protect(self._parts, old, made))
        self._saves.last_step = old.step
        self._parts.counts.update(("restores", "resharded"))
        if self._world.rank == 0:
            log.info("restored step %d from memory, put together for %d ranks", old.step, self._world.size)
        return old.step

    def _find(self, step: int | None, others: bool = False) -> Home | Elsewhere | None:
        start = time.perf_counter()
        self._saves.wait()
        self._saves.forget()
        found: Home | Elsewhere | None
        found = self._courier.call(lambda: restore.bring_home(self._parts, step, others))
        self._seconds["find and fetch"] += time.perf_counter() - start
        return found

    def _together(self, step: int, work: Callable[[], None]) -> None:
        """Do something with the state on this rank; what goes wrong on any rank is raised on all."""
        error: MlflashError | None = None
        try:
            work()
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # load_state_dict of an object may raise anything: all ranks must hear of it
            error = StructureMismatch(f"loading failed: {problem!r}")
            error.__cause__ = problem
        if error is not None:
            error.rank, error.node, error.step = self._world.rank, self._world.node_name, step
        self._courier.call(lambda: self._world.raise_together(error))

    def _restored(self, home: Home) -> int:
        self._parts.shelf.unmap_others(home.shares)
        reach("restore.loaded")
        step = self._saves.last_step = home.header.step
        restore.count(self._parts, home.slot)
        self._parts.counts["restores"] += 1
        if self._world.rank == 0:
            log.info("restored step %d from memory", step)
        if self._parts.rolled_forward:
            # Until its copies are made, only the step before covers a lost node: no save may write over that.
            self._parts.shelf.hold_older()
        self._courier.post(Job(lambda: self._heal(home.slot)))
        return step

    def _heal_first(self, home: Home) -> None:
        """Where a step was rolled forward its slots must not be all there is while it is put together or read."""
        if self._parts.rolled_forward:
            self._courier.call(lambda: restore.heal_or_remember(self._parts, home.slot))

    def _heal(self, home: Slot) -> None:
        start = time.perf_counter()
        restore.heal_or_remember(self._parts, home)
        self._seconds["heal"] += time.perf_counter() - start


def _finish(whole: bool, done: Callable[[], None]) -> None:
    if not whole:
        raise CorruptSlot("parts of the checkpoint did not arrive whole from other ranks")
    done()
