"""The restores of this run: found, brought home, loaded together, and healed behind.

What goes wrong on any rank is raised on all of them, so that no rank trains on from another step than the others.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..crash_points import reach
from ..draining.drain_queue import DrainQueue
from ..errors import (
    CorruptSlot,
    MemoryTooSmall,
    MlflashError,
    StateError,
    StructureMismatch,
    WorldSizeChanged,
)
from ..memory.slot import Slot
from ..mpi.courier import Courier, Job
from ..redundancy.rank_checkpoint import RankCheckpoint
from ..redundancy.shareable_leaves import replica_nbytes
from ..saving.save_queue import SaveQueue
from ..startup.context import Context
from ..state.flatten import flatten_or_none
from ..state.rebuild import Filling, materialize, refuse_differences
from . import from_memory, resharding
from .all_or_nothing import Loading
from .choose_source import Sources
from .exchange_fragments import WantedPart
from .heal import heal_or_remember
from .newest_step import Newest
from .open_in_directory import OpenInDirectory
from .open_in_memory import FoundElsewhere, OpenCheckpoint, OpenInMemory

log = logging.getLogger("mlflash")


class Restores:
    """Fills states with what memory or the directory holds.

    Args:
        context: this rank's slots and communicators.
        courier: does all that is collective.
        saves: told of the step that was restored.
        drains: knows what is in the directory.

    Attributes:
        newest: says which step can really be loaded.
    """

    def __init__(self, context: Context, courier: Courier, saves: SaveQueue, drains: DrainQueue):
        self._context, self._courier, self._saves, self._drains = context, courier, saves, drains
        self._world, self._recorder = context.world, context.recorder
        self._sources = Sources(context, drains)
        self._loading = Loading(context.world, courier, saves)
        self._began = time.perf_counter()  # the restore that goes on
        self.newest = Newest(context, courier, self._find, self._find_whole, self.steps_alike)

    def restore(self, state: Any, step: int | None, source: str | None = None) -> int | None:
        """Fill a state in place; see `Checkpointer.restore`."""
        self._saves.begun.wait()
        held = self._courier.together(lambda: _held_by_replicas(state), _unreadable)
        self._courier.call(lambda: self._context.find_replicas(held))
        bad: dict[str, str] = {}
        while True:
            found = self._find(step, others=True, source=source, bad=bad)
            if not isinstance(found, OpenInDirectory):
                break
            try:
                return self._put_together(found, state)
            except CorruptSlot as error:  # the same on all ranks
                self._sources.pass_over(found.listed, found.damage or str(error), bad)
            finally:
                found.close()
        if found is None:
            self._prepare_or_warn(state)
            return None
        if isinstance(found, RankCheckpoint):
            home = found
            if self._shards_differ(home, state):
                found = FoundElsewhere(home.header.attempt, home.header.step, self._context.restores,
                                       {self._world.rank: home}, home.files)  # fmt: skip
                self._heal_first(home)
        if isinstance(found, FoundElsewhere):
            elsewhere = found
            found = self._courier.call(lambda: OpenInMemory(self._context, elsewhere, checks=True))
        if not isinstance(found, RankCheckpoint):
            return self._put_together(found, state)
        start = time.perf_counter()
        self._hold_until_healed(home)
        manifest, read = home.manifest, home.reader()
        self._loading.together(home.header.step, lambda: refuse_differences(state, manifest.tree, manifest.entries))
        filling = Filling(state, manifest.tree, manifest.entries, manifest.plain, read)
        self._loading.fill(home.header.step, filling)
        self._recorder.seconds["load"] += time.perf_counter() - start
        return self._restored(home)

    def _shards_differ(self, home: RankCheckpoint, state: Any) -> bool:
        """Whether the state of any rank has other shards than its checkpoint; else it can be loaded as it is.

        Collective over the world.
        """
        differ = self._courier.together(
            lambda: resharding.only_shards_differ(state, home), _unreadable, home.header.step
        )
        return not self._courier.call(lambda: self._world.agree([int(not differ)]))[0]

    def load(self, step: int | None, source: str | None = None, copy: bool = True) -> tuple[int | None, Any]:
        """Give the state anew; see `Checkpointer.load`."""
        bad: dict[str, str] = {}
        while isinstance(found := self._find(step, source=source, bad=bad, checked=copy), OpenInDirectory):
            try:
                return self._load_drained(found)
            except CorruptSlot as error:  # the same on all ranks
                self._sources.pass_over(found.listed, found.damage or str(error), bad)
            finally:
                found.close()
        if not isinstance(found, RankCheckpoint):
            return None, None
        reach("restore.loading")
        home = found
        self._hold_until_healed(home)

        def build() -> Any:
            its, manifest = home, home.manifest
            if not copy:
                lend = self._context.pool.lend
                its = RankCheckpoint(lend(home.slot), manifest, [lend(share) for share in home.shares], home.files)
            return materialize(manifest.tree, manifest.entries, manifest.plain, its.reader(), copy)

        state = self._courier.together(build, lambda why: MlflashError(f"loading failed: {why}"), home.header.step)
        return self._restored(home), state

    def open(self, step: int | None, told: Collection[str], source: str | None = None) -> OpenCheckpoint | None:
        """Open a checkpoint to read any part of it; see `Adapting.open`."""
        find = self._find_whole if step is None else self._find
        found = find(step, others=True, source=source, told=told)
        if found is None or isinstance(found, OpenInDirectory):
            return found
        if isinstance(found, RankCheckpoint):
            home = found
            self._heal_first(home)
            found = FoundElsewhere(home.header.attempt, home.header.step, self._context.restores,
                              {self._world.rank: home}, home.files, same_ranks=True)  # fmt: skip
        elsewhere = found
        opened: OpenInMemory = self._courier.call(lambda: OpenInMemory(self._context, elsewhere, told=told))
        return opened

    def read(
        self,
        opened: OpenCheckpoint,
        wanted: Callable[[], Iterable[WantedPart]],
        done: Callable[[], None],
        anew: bool = False,
    ) -> None:
        """Read out of an opened checkpoint and close it; see `Adapting.read`."""
        start, step = time.perf_counter(), opened.step
        wanted_parts: list[WantedPart] = []
        try:
            self._loading.together(step, lambda: wanted_parts.extend(wanted()))
            with contextlib.nullcontext() if anew else self._loading.changing(step):
                whole = self._courier.call(lambda: opened.read(wanted_parts))
                self._loading.together(step, lambda: _finish(whole, done))
        finally:
            opened.close()
        self._recorder.seconds["load"] += time.perf_counter() - start
        if opened.home is not None:
            self._restored(opened.home)
            return
        self._count(step, opened)

    def steps(self) -> list[int]:
        """List the steps that can be restored; see `Checkpointer.steps`."""
        return self._steps(alike=False)

    def _steps(self, alike: bool) -> list[int]:
        self._saves.settle()
        size = self._world.size

        def work() -> list[int]:
            drained = {one.step for one in self._drains.listed() if not alike or one.card.world_size == size}
            return sorted(drained.union(from_memory.restorable_steps(self._context, alike=alike)))

        steps: list[int] = self._courier.call(work)
        return steps

    def steps_alike(self) -> list[int]:
        """List the steps that as many ranks have saved; see `Adapting.steps_alike`."""
        return self._steps(alike=True)

    def _prepare_or_warn(self, state: Any) -> None:
        try:
            self._saves.prepare(state)
        except (MemoryTooSmall, StateError) as error:  # training may begin; each save will say so again
            if self._world.rank == 0:
                log.warning("the slots could not be made: %s", error)

    def _put_together(self, old: OpenCheckpoint, state: Any) -> int:
        """Restore what was saved by other ranks, or in other shards, or is not in memory."""
        start = time.perf_counter()
        made: resharding.Resharded
        try:
            made = resharding.reshard(self._context, self._courier, old, state)
        except MemoryTooSmall:  # on all ranks
            if self._context.gives_way or not isinstance(old, OpenInDirectory):
                raise
            # What memory has is no use now; but it may go for what is known to be whole only.
            self.newest.verify(old)
            self._context.gives_way = True
            made = resharding.reshard(self._context, self._courier, old, state)
        try:
            self._loading.fill(old.step, made.filling(state))
        except BaseException:  # where it is interrupted, too
            resharding.give_up(self._context, made)
            raise
        self._recorder.seconds["load"] += time.perf_counter() - start
        reach("restore.loaded")
        self._courier.call(lambda: resharding.protect(self._context, old, made))
        self._recorder.counts["drained restores" if isinstance(old, OpenInDirectory) else "resharded"] += 1
        self._count(old.step, old)
        return old.step

    def _load_drained(self, found: OpenInDirectory) -> tuple[int, Any]:
        if found.world_size != self._world.size:
            raise WorldSizeChanged("the checkpoint was saved by another number of ranks: restore(state) puts it "
                                   "together for this one", step=found.step, expected=f"{found.world_size} ranks",
                                   found=self._world.size)  # fmt: skip
        manifest, read, wanted_parts = found.state(self._world.rank)
        whole = self._courier.call(lambda: found.read(wanted_parts))
        self._loading.together(found.step, lambda: _finish(whole, lambda: None))
        self._count(found.step, found)
        return found.step, materialize(manifest.tree, manifest.entries, manifest.plain, read)

    def _find(
        self, step: int | None, others: bool = False, source: str | None = None, told: Collection[str] = (),
        bad: dict[str, str] | None = None, checked: bool = True,
    ) -> RankCheckpoint | FoundElsewhere | OpenInDirectory | None:  # fmt: skip
        start = self._began = time.perf_counter()
        self._saves.settle()
        self._drains.wait()
        self._saves.forget()
        found: RankCheckpoint | FoundElsewhere | OpenInDirectory | None = (
            self.newest.take(step) if source is None else None
        )
        if found is not None:
            return found
        passed_over = {} if bad is None else bad
        found = self._courier.call(lambda: self._sources.choose(step, others, source, told, passed_over, checked))
        self._recorder.seconds["find and fetch"] += time.perf_counter() - start
        return found

    def _find_whole(
        self, step: int | None, others: bool = False, source: str | None = None, told: Collection[str] = ()
    ) -> RankCheckpoint | FoundElsewhere | OpenInDirectory | None:
        """Find a step, or the newest, of which every byte is verified, also where it comes from the directory."""
        bad: dict[str, str] = {}
        while isinstance(found := self._find(step, others, source, told, bad), OpenInDirectory):
            try:
                self.newest.verify(found)
                break
            except CorruptSlot as error:  # the same on all ranks
                self._sources.pass_over(found.listed, found.damage or str(error), bad)
                found.close()
        return found

    def _restored(self, home: RankCheckpoint) -> int:
        self._context.pool.unmap_others(home.shares)
        reach("restore.loaded")
        step = home.header.step
        from_memory.count(self._context, home.slot)
        self._count(step, home)
        self._context.unhealed = None  # the heal comes now, and saves wait for it
        self._courier.post(Job(lambda: self._heal(home.slot)))
        return step

    def _count(self, step: int, source: object) -> None:
        """Note that a step was restored: out of memory, or of a directory."""
        self._saves.last_step = step
        self._context.gives_way = True  # what is newer, and could not be restored, has no claim to room any more
        where = source.path if isinstance(source, OpenInDirectory) else "memory"
        how = "" if isinstance(source, RankCheckpoint) else f", put together for {self._world.size} ranks"
        nbytes = source.slot.header.extents.nbytes if isinstance(source, RankCheckpoint) and source.slot.header else 0
        seconds = time.perf_counter() - self._began
        self._recorder.restored(step, seconds, where, self._context.restored_from, nbytes, how)

    def _hold_until_healed(self, home: RankCheckpoint) -> None:
        """Where a step was rolled forward, keep saves from the step before, whether this one can be loaded or not.

        Until its copies are made only that covers a lost node. Not collective, but the same on all ranks.
        """
        if self._context.rolled_forward:
            self._context.pool.hold_older()
            self._context.unhealed = home.slot

    def _heal_first(self, home: RankCheckpoint) -> None:
        """Where a step was rolled forward its slots must not be all there is while it is put together or read."""
        if self._context.rolled_forward:
            self._courier.call(lambda: heal_or_remember(self._context, home.slot))

    def _heal(self, home: Slot) -> None:
        start, step = time.perf_counter(), 0 if home.header is None else home.header.step
        before = self._recorder.counts["slots healed"]
        heal_or_remember(self._context, home)
        self._recorder.healed(step, time.perf_counter() - start, self._recorder.counts["slots healed"] > before)
        self._recorder.holds(self._context.pool.nbytes)


def _held_by_replicas(state: Any) -> dict[tuple[int, ...], int]:
    """The bytes of DTensors of a state, by the ranks that hold the same of them. Not collective."""
    return replica_nbytes(flatten_or_none(state) if "torch.distributed.tensor" in sys.modules else None)


def _unreadable(why: str) -> StructureMismatch:
    return StructureMismatch(f"the state could not be read: {why}")


def _finish(whole: bool, done: Callable[[], None]) -> None:
    if not whole:
        raise CorruptSlot("parts of the checkpoint did not arrive whole from other ranks")
    done()
