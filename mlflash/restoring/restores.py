"""The restores of this run: found, brought home, loaded together, and healed behind.

What goes wrong on any rank is raised on all of them, so that no rank trains on from another step than the others.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..crash_points import reach
from ..draining.catalog import Listed, Listing, step_of
from ..draining.drained import Drained
from ..draining.queue import Drains
from ..errors import CorruptSlot, MemoryTooSmall, MlflashError, StateError, StepNotFound, Unrestorable, WorldSizeChanged
from ..memory.commit_records import MOST_STEPS
from ..memory.inventory import Place
from ..memory.slot import Slot
from ..recovery import find
from ..recovery.fragments import Parcel
from ..recovery.gather_shares import Home
from ..recovery.open_checkpoint import Elsewhere, Opened, Readable
from ..runtime.parts import Parts
from ..saving.saves import Saves
from ..state.flatten import flatten_or_none
from ..state.rebuild import Filling, materialize, refuse_differences
from ..storage.store import open_store
from ..wire.courier import Courier, Job
from . import reshard
from .loading import Loading
from .newest import Newest

log = logging.getLogger("mlflash")


class Restores:
    """Fills states with what memory or the directory holds.

    Args:
        parts: this rank's slots and communicators.
        courier: does all that is collective.
        saves: told of the step that was restored.
        drains: knows what is in the directory.

    Attributes:
        newest: says which step can really be loaded.
    """

    def __init__(self, parts: Parts, courier: Courier, saves: Saves, drains: Drains):
        self._parts, self._courier, self._saves, self._drains = parts, courier, saves, drains
        self._world, self._journal = parts.world, parts.journal
        self._loading = Loading(parts.world, courier, saves)
        self._began = time.perf_counter()  # the restore that goes on
        self.newest = Newest(parts, courier, self._find, self._find_whole, self.steps_alike)

    def restore(self, state: Any, step: int | None, source: str | None = None) -> int | None:
        """Fill a state in place; see `Checkpointer.restore`."""
        self._saves.begun.wait()
        placed = flatten_or_none(state) if "torch.distributed.tensor" in sys.modules else None
        self._courier.call(lambda: self._parts.find_replicas(placed))
        bad: dict[str, str] = {}
        while True:
            found = self._find(step, others=True, source=source, bad=bad)
            if not isinstance(found, Drained):
                break
            try:
                return self._put_together(found, state)
            except CorruptSlot as error:  # the same on all ranks
                self._pass_over(found.listed, found.damage or str(error), bad)
            finally:
                found.close()
        if found is None:
            self._prepare_or_warn(state)
            return None
        if isinstance(found, Home):
            home = found
            found = self._courier.call(lambda: reshard.unless_alike(self._parts, home, state))
            if isinstance(found, Elsewhere):
                self._heal_first(home)
        if isinstance(found, Elsewhere):
            elsewhere = found
            found = self._courier.call(lambda: Opened(self._parts, elsewhere, checks=True))
        if not isinstance(found, Home):
            return self._put_together(found, state)
        start = time.perf_counter()
        self._hold_until_healed(home)
        manifest, read = home.manifest, home.reader()
        self._loading.together(home.header.step, lambda: refuse_differences(state, manifest.tree, manifest.entries))
        filling = Filling(state, manifest.tree, manifest.entries, manifest.plain, read)
        self._loading.fill(home.header.step, filling)
        self._journal.seconds["load"] += time.perf_counter() - start
        return self._restored(home)

    def load(self, step: int | None, source: str | None = None, copy: bool = True) -> tuple[int | None, Any]:
        """Give the state anew; see `Checkpointer.load`."""
        bad: dict[str, str] = {}
        while isinstance(found := self._find(step, source=source, bad=bad, checked=copy), Drained):
            try:
                return self._load_drained(found)
            except CorruptSlot as error:  # the same on all ranks
                self._pass_over(found.listed, found.damage or str(error), bad)
            finally:
                found.close()
        if not isinstance(found, Home):
            return None, None
        reach("restore.loading")
        home = found
        self._hold_until_healed(home)

        def build() -> Any:
            its, manifest = home, home.manifest
            if not copy:
                lend = self._parts.shelf.lend
                its = Home(lend(home.slot), manifest, [lend(share) for share in home.shares], home.files)
            return materialize(manifest.tree, manifest.entries, manifest.plain, its.reader(), copy)

        state = self._courier.together(build, lambda why: MlflashError(f"loading failed: {why}"), home.header.step)
        return self._restored(home), state

    def open(self, step: int | None, told: Collection[str], source: str | None = None) -> Readable | None:
        """Open a checkpoint to read any part of it; see `Adapting.open`."""
        find = self._find_whole if step is None else self._find
        found = find(step, others=True, source=source, told=told)
        if found is None or isinstance(found, Drained):
            return found
        if isinstance(found, Home):
            home = found
            self._heal_first(home)
            found = Elsewhere(home.header.attempt, home.header.step, self._parts.restores,
                              {self._world.rank: home}, home.files, same_ranks=True)  # fmt: skip
        elsewhere = found
        opened: Opened = self._courier.call(lambda: Opened(self._parts, elsewhere, told=told))
        return opened

    def read(
        self, opened: Readable, wanted: Callable[[], Iterable[Parcel]], done: Callable[[], None], anew: bool = False
    ) -> None:
        """Read out of an opened checkpoint and close it; see `Adapting.read`."""
        start, step = time.perf_counter(), opened.step
        parcels: list[Parcel] = []
        try:
            self._loading.together(step, lambda: parcels.extend(wanted()))
            with contextlib.nullcontext() if anew else self._loading.changing(step):
                whole = self._courier.call(lambda: opened.read(parcels))
                self._loading.together(step, lambda: _finish(whole, done))
        finally:
            opened.close()
        self._journal.seconds["load"] += time.perf_counter() - start
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
            return sorted(drained.union(find.restorable_steps(self._parts, alike=alike)))

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

    def _put_together(self, old: Readable, state: Any) -> int:
        """Restore what was saved by other ranks, or in other shards, or is not in memory."""
        start = time.perf_counter()
        made: reshard.Resharded
        try:
            made = self._courier.call(lambda: reshard.reshard(self._parts, old, state))
        except MemoryTooSmall:  # on all ranks
            if self._parts.gives_way or not isinstance(old, Drained):
                raise
            # What memory has is no use now; but it may go for what is known to be whole only.
            self.newest.verify(old)
            self._parts.gives_way = True
            made = self._courier.call(lambda: reshard.reshard(self._parts, old, state))
        try:
            self._loading.fill(old.step, made.filling(state))
        except BaseException:  # where it is interrupted, too
            reshard.give_up(self._parts, made)
            raise
        self._journal.seconds["load"] += time.perf_counter() - start
        reach("restore.loaded")
        self._courier.call(lambda: reshard.protect(self._parts, old, made))
        self._journal.counts["drained restores" if isinstance(old, Drained) else "resharded"] += 1
        self._count(old.step, old)
        return old.step

    def _load_drained(self, found: Drained) -> tuple[int, Any]:
        if found.world_size != self._world.size:
            raise WorldSizeChanged("the checkpoint was saved by another number of ranks: restore(state) puts it "
                                   "together for this one", step=found.step, expected=f"{found.world_size} ranks",
                                   found=self._world.size)  # fmt: skip
        manifest, read, parcels = found.state(self._world.rank)
        whole = self._courier.call(lambda: found.read(parcels))
        self._loading.together(found.step, lambda: _finish(whole, lambda: None))
        self._count(found.step, found)
        return found.step, materialize(manifest.tree, manifest.entries, manifest.plain, read)

    def _find(
        self, step: int | None, others: bool = False, source: str | None = None, told: Collection[str] = (),
        bad: dict[str, str] | None = None, checked: bool = True,
    ) -> Home | Elsewhere | Drained | None:  # fmt: skip
        start = self._began = time.perf_counter()
        self._saves.settle()
        self._drains.wait()
        self._saves.forget()
        found: Home | Elsewhere | Drained | None = self.newest.take(step) if source is None else None
        if found is not None:
            return found
        passed_over = {} if bad is None else bad
        found = self._courier.call(lambda: self._newest(step, others, source, told, passed_over, checked))
        self._journal.seconds["find and fetch"] += time.perf_counter() - start
        return found

    def _find_whole(
        self, step: int | None, others: bool = False, source: str | None = None, told: Collection[str] = ()
    ) -> Home | Elsewhere | Drained | None:
        """Find a step, or the newest, of which every byte is verified, also where it comes from the directory."""
        bad: dict[str, str] = {}
        while isinstance(found := self._find(step, others, source, told, bad), Drained):
            try:
                self.newest.verify(found)
                break
            except CorruptSlot as error:  # the same on all ranks
                self._pass_over(found.listed, found.damage or str(error), bad)
                found.close()
        return found

    def _newest(self, step: int | None, others: bool, source: str | None, told: Collection[str], bad: dict[str, str],
                checked: bool) -> Home | Elsewhere | Drained | None:  # fmt: skip
        """Choose between memory and directory: what was saved last. Collective over the world.

        Args:
            bad: folders of the directory that are passed over, and why; gets those found so.
            checked: verify every byte of what is in memory.

        Returns:
            What was found; None where nothing was ever committed.

        Raises:
            Unrestorable, StepNotFound: on all ranks; nothing was changed.
        """
        store = self._drains.store if source is None else open_store(source)
        there = self._drains.look(store)
        listed = [one for one in there.listed if step in (None, one.step)]
        struck: dict[Place, str] = {}
        while True:
            left = [one for one in listed if one.folder not in bad]
            if source is None:
                oldest = left[0].card.attempt.generation if left else 0
                found = find.bring_home(self._parts, step, others, oldest, checked, struck)
                if found is not None:
                    self._parts.looked = True
                    return found
            if not left or store is None:
                break
            if struck and not self._parts.unusable:  # what is in the directory may be damaged, too
                self._parts.leave_alone()
            try:
                drained = Drained(self._world, store, left[0], told)
            except CorruptSlot as error:  # the same on all ranks
                self._pass_over(left[0], str(error), bad)
            else:
                self._say_why(drained, step, source)
                return drained
        self._refuse_unusable(step, source, there, bad, struck)
        self._parts.looked = True
        return None

    def _refuse_unusable(self, step: int | None, source: str | None, there: Listing, bad: Mapping[str, str],
                         struck: Mapping[Place, str]) -> None:  # fmt: skip
        """Raise where something is there, and none of it can be used. Collective over the world.

        Args:
            there: what is in the directory.
            bad, struck: folders there, and files in memory, that were found to be damaged, and how.
        """
        reasons, begun = find.why_not(self._parts, struck) if source is None else ({}, [])
        in_memory = bool(reasons)
        for folder, why in {**there.damaged, **bad}.items():
            at = step_of(folder)
            if at is not None and (at in reasons or len(reasons) < MOST_STEPS):
                reasons[at] = "; ".join(filter(None, (reasons.get(at), f"{folder}: {why}")))
        if step is not None:
            held = [] if source is not None else find.restorable_steps(self._parts)
            drained = sorted({one.step for one in there.listed if one.folder not in bad})
            store = self._drains.store if source is None else open_store(source)
            in_store = f", in {store.path}: {there.problem or drained}" if store is not None else ""
            why = f"this step is there, and cannot be restored: {reasons[step]}" if step in reasons else ""
            raise StepNotFound(why or "this step cannot be restored", step=step,
                               found=f"steps in memory: {held}{in_store}")  # fmt: skip
        if reasons or there.problem:
            error = Unrestorable(
                (f"{there.problem}, and memory has nothing that can be restored" if there.problem else
                 "checkpoints are there, and none of them can be restored")
                + ": nothing was deleted. Start again where what is missing is back, or begin anew with "
                "Checkpointer(fresh=True) or MLFLASH_FRESH=1",
                reasons=reasons,
            )  # fmt: skip
            if in_memory:
                self._parts.leave_alone()
            self._journal.unrestorable(error)
            raise error
        if begun and self._world.rank == 0:
            log.warning("memory has parts of step %s, whose first save did not end: nothing was ever committed",
                        ", ".join(map(str, begun)))  # fmt: skip

    def _pass_over(self, listed: Listed, why: str, bad: dict[str, str]) -> None:
        bad[listed.folder] = why
        if self._world.rank == 0:
            log.warning("%s cannot be restored from, and an older checkpoint is looked for: %s", listed.folder, why)

    def _say_why(self, drained: Drained, step: int | None, source: str | None) -> None:
        self._parts.restored_from, self._parts.rolled_forward = drained.path, False
        if source is not None or step is not None:
            why = "as asked"
        else:
            held = find.restorable_steps(self._parts)
            why = f"memory has only older steps: {held}" if held else "memory has nothing"
        if self._world.rank == 0:
            log.info("restoring step %d from %s: %s", drained.step, drained.path, why)

    def _restored(self, home: Home) -> int:
        self._parts.shelf.unmap_others(home.shares)
        reach("restore.loaded")
        step = home.header.step
        find.count(self._parts, home.slot)
        self._count(step, home)
        self._parts.unhealed = None  # the heal comes now, and saves wait for it
        self._courier.post(Job(lambda: self._heal(home.slot)))
        return step

    def _count(self, step: int, source: object) -> None:
        """Note that a step was restored: out of memory, or of a directory."""
        self._saves.last_step = step
        self._parts.gives_way = True  # what is newer, and could not be restored, has no claim to room any more
        where = source.path if isinstance(source, Drained) else "memory"
        how = "" if isinstance(source, Home) else f", put together for {self._world.size} ranks"
        nbytes = source.slot.header.extents.nbytes if isinstance(source, Home) and source.slot.header else 0
        seconds = time.perf_counter() - self._began
        self._journal.restored(step, seconds, where, self._parts.restored_from, nbytes, how)

    def _hold_until_healed(self, home: Home) -> None:
        """Where a step was rolled forward, keep saves from the step before, whether this one can be loaded or not.

        Until its copies are made only that covers a lost node. Not collective, but the same on all ranks.
        """
        if self._parts.rolled_forward:
            self._parts.shelf.hold_older()
            self._parts.unhealed = home.slot

    def _heal_first(self, home: Home) -> None:
        """Where a step was rolled forward its slots must not be all there is while it is put together or read."""
        if self._parts.rolled_forward:
            self._courier.call(lambda: find.heal_or_remember(self._parts, home.slot))

    def _heal(self, home: Slot) -> None:
        start, step = time.perf_counter(), 0 if home.header is None else home.header.step
        before = self._journal.counts["slots healed"]
        find.heal_or_remember(self._parts, home)
        self._journal.healed(step, time.perf_counter() - start, self._journal.counts["slots healed"] > before)
        self._journal.holds(self._parts.shelf.nbytes)


def _finish(whole: bool, done: Callable[[], None]) -> None:
    if not whole:
        raise CorruptSlot("parts of the checkpoint did not arrive whole from other ranks")
    done()
