"""The restores of this run: found, fetched, loaded together, and protected in the background.

An error on any rank is raised on all of them, so that no rank trains on from another step than the others.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import xxhash

from ..channel.client import TrainerState
from ..channel.ranks import Ranks
from ..channel.records import FoundInMemory, Search
from ..channel.wanted_parts import WantedPart
from ..crash_points import reach
from ..drain.checkpoint_directory import Listed
from ..drain.drain_handle import Drains
from ..errors import (
    CorruptSlot,
    DeadlineExceeded,
    MemoryTooSmall,
    MlflashError,
    StateError,
    StepNotFound,
    StructureMismatch,
    Unrestorable,
    WorldSizeChanged,
)
from ..memory.inventory import NEWEST, WantedStep
from ..protect.rank_checkpoint import RankCheckpoint, open_rank_checkpoint
from ..save.save_queue import SaveQueue
from ..state.leaves import Described
from ..state.rebuild import Comparison, Filling, materialize
from ..storage.store import open_store
from . import reshard
from .open_in_directory import OpenInDirectory
from .open_in_memory import MemoryCheckpoint, OpenCheckpoint, OpenInMemory, open_home

log = logging.getLogger("mlflash")

T = TypeVar("T")

_KEPT_NBYTES = 64 << 20  # of everything that a rank keeps to put it back
_UNDEFINED = ("the state that you gave is now undefined: restore again, or begin anew; save refuses until a "
              "restore succeeds")  # fmt: skip
Found = MemoryCheckpoint | OpenInDirectory | None
_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


class Loading:
    """Fills states on all ranks or on none: an error on any rank is raised on all, and what was loaded is put back.

    First come objects whose saved state is small; their previous values are kept meanwhile. For large objects, tensors
    and arrays there is no room for that, nor for objects of a framework (`changing`): if their load fails, the state is
    undefined, and nothing is saved until a restore has succeeded.
    """

    def __init__(self, ranks: Ranks, saves: SaveQueue):
        self._ranks, self._saves = ranks, saves

    def together(self, step: int, work: Callable[[], T]) -> T:
        """Do something with the state on this rank; raise on all ranks what goes wrong on any."""
        return self._ranks.together(work, lambda why: StructureMismatch(f"loading failed: {why}"), step)

    @contextlib.contextmanager
    def changing(self, step: int) -> Iterator[None]:
        """Change a state that cannot be put back: if that fails, the state is undefined."""
        self._saves.undefined = _half_loaded(step)
        try:
            yield
        except DeadlineExceeded:
            raise
        except MlflashError as error:  # the same on all ranks
            self._stay_undefined(error)
            raise
        self._saves.undefined = ""

    def _stay_undefined(self, error: MlflashError) -> None:
        self._saves.undefined = str(error)
        error.message += f"; {_UNDEFINED}"

    def fill(self, step: int, filling: Filling, has_same: bool | None = None) -> None:
        """Fill a state that was already compared with the checkpoint. Collective over the world.

        Args:
            has_same: whether all ranks have objects of the same names; None: they have not agreed on it yet.

        Raises:
            MlflashError: on all ranks, what went wrong on any. The state is as it was before, or the text says that it
                is undefined.
        """
        if has_same is None:
            has_same = self._ranks.is_same(name_of_objects(filling))
        small = self._small(filling) if has_same else []

        def load_small() -> None:
            filling.keep(small)
            filling.load(small)

        def load_rest() -> None:
            filling.load([path for path in filling.objects if path not in small])
            without_collections(filling.fill_leaves)()

        reach("restore.loading")
        before = self._saves.undefined
        self._saves.undefined = _half_loaded(step)  # it must stay undefined after an interrupt, too
        try:
            self.together(step, load_small)
            self.together(step, load_rest)
        except DeadlineExceeded:  # the ranks cannot agree on anything now
            raise
        except MlflashError as error:  # the same on all ranks
            if self._ranks.all_of(filling.put_back()):
                self._saves.undefined = before
            else:
                self._stay_undefined(error)
            raise
        self._saves.undefined = ""

    def _small(self, filling: Filling) -> list[str]:
        """The objects that are kept, the same on all ranks, as what they do may be collective."""
        sizes = {path: filling.nbytes_of(path) for path in filling.objects}
        if not sizes:
            return []
        largest = [-most for most in self._ranks.least_of([-nbytes for nbytes in sizes.values()])]
        small, room = set(), _KEPT_NBYTES
        for nbytes, path in sorted(zip(largest, sizes, strict=True)):
            room -= nbytes
            if room >= 0:
                small.add(path)
        return [path for path in sizes if path in small]


def name_of_objects(filling: Filling) -> int:
    """A number that the names of a state's objects have, which fits an int64."""
    return xxhash.xxh3_64_intdigest("\n".join(filling.objects).encode()) >> 1


def _half_loaded(step: int) -> str:
    return f"the load of step {step} did not finish"


def _doing(method: Callable[Concatenate[Restores, _Takes], _Gives]) -> Callable[Concatenate[Restores, _Takes], _Gives]:
    """Let other ranks know that this one restores as long as a method runs, and log for whom it waits in the method."""

    @functools.wraps(method)
    def doing(self: Restores, /, *args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
        self._ranks.tell_doing("restoring")
        try:
            return method(self, *args, **kwargs)
        finally:
            self._ranks.tell_doing("")

    return doing


class Restores:
    """Fills states with what memory or the directory holds."""

    def __init__(self, trainer: TrainerState, saves: SaveQueue, drains: Drains):
        self._trainer, self._courier, self._saves, self._drains = trainer, trainer.courier, saves, drains
        self._ranks, self._recorder, self._slots = trainer.ranks, trainer.recorder, trainer.slots
        self._loading = Loading(trainer.ranks, saves)
        self._began = time.perf_counter()  # start of the current restore
        self._in_memory: FoundInMemory | None = None  # what the last search found there
        self._verified: set[Listed] = set()  # checkpoints of the directory of which every byte is verified

    @_doing
    def restore(self, state: Any, wanted: WantedStep, source: str | None = None) -> int | None:
        """Fill a state in place; see `Checkpointer.restore`."""
        self._saves.reservations.wait()
        self._saves.find_replicas(state)
        search = Search(wanted, source, others=True)
        while isinstance(choice := self._choose(search), OpenInDirectory):
            with contextlib.closing(choice), self._passing_over(choice, search):
                return self._put_together(choice, state)
        if choice is None:
            self._prepare_or_warn(state)
            return None
        checkpoint, filling, has_same = self._compare(choice, state)
        home = checkpoint.own
        if home is None or filling is None:
            if home is not None:  # other shards
                self._courier.call("reprotect_first", self._number_of(home))
            return self._put_together(OpenInMemory(self._trainer, checkpoint, checks=True), state)
        start = time.perf_counter()
        self._hold_until_protected(home)
        self._loading.fill(checkpoint.step, filling, has_same)
        self._recorder.seconds["load"] += time.perf_counter() - start
        return self._restored(home)

    @_doing
    def load(self, wanted: WantedStep, source: str | None = None, copy: bool = True) -> tuple[int | None, Any]:
        """Return the state anew; see `Checkpointer.load`."""
        search = Search(wanted, source, checked=copy)
        while isinstance(checkpoint := self._find(search), OpenInDirectory):
            with contextlib.closing(checkpoint), self._passing_over(checkpoint, search):
                return self._load_drained(checkpoint)
        if checkpoint is None:
            return None, None
        reach("restore.loading")
        home = checkpoint.own
        assert home is not None  # no other number of ranks was asked for
        self._hold_until_protected(home)

        def build() -> Any:
            source, manifest = home, home.manifest
            if not copy:
                lend = self._slots.lend
                source = RankCheckpoint(lend(home.slot), manifest, list(map(lend, home.shares)), home.files)
            return materialize(manifest.tree, manifest.entries, manifest.plain, source.reader(), copy)

        state = self._ranks.together(build, lambda why: MlflashError(f"loading failed: {why}"), checkpoint.step)
        return self._restored(home), state

    @_doing
    def look_at(self, step: int) -> Any:
        """Return a state that these ranks have saved, anew. Training does not go on from it.

        Collective over comm. Raises StepNotFound, WorldSizeChanged or Unrestorable on all ranks.
        """
        checkpoint = self._find(Search(WantedStep(step)))
        assert isinstance(checkpoint, MemoryCheckpoint) and checkpoint.own is not None
        home = checkpoint.own

        def build() -> Any:
            manifest = home.manifest
            return materialize(manifest.tree, manifest.entries, manifest.plain, home.reader())

        try:
            return self._ranks.together(build, lambda why: MlflashError(f"loading failed: {why}"), step)
        finally:
            self._slots.unmap_others(home.shares)

    @_doing
    def open(self, step: int | None, broadcast: Collection[str], source: str | None = None) -> OpenCheckpoint | None:
        """Open a checkpoint to read any part of it; see `AdapterAPI.open`."""
        find = self._find_verified if step is None else self._find
        checkpoint = find(Search(WantedStep(step), source, others=True, broadcast=broadcast))
        if checkpoint is None or isinstance(checkpoint, OpenInDirectory):
            return checkpoint
        if checkpoint.own is not None:
            self._courier.call("reprotect_first", self._number_of(checkpoint.own))
        return OpenInMemory(self._trainer, checkpoint, broadcast=broadcast)

    @_doing
    def read(
        self,
        opened: OpenCheckpoint,
        wanted: Callable[[], Iterable[WantedPart]],
        done: Callable[[], None],
        anew: bool = False,
    ) -> None:
        """Read from an opened checkpoint and close it; see `AdapterAPI.read`."""
        start, step = time.perf_counter(), opened.step
        wanted_parts: list[WantedPart] = []
        try:
            self._loading.together(step, lambda: wanted_parts.extend(wanted()))
            with contextlib.nullcontext() if anew else self._loading.changing(step):
                is_intact = opened.read(wanted_parts)
                self._loading.together(step, lambda: _finish(is_intact, done))
        finally:
            opened.close()
        self._recorder.seconds["load"] += time.perf_counter() - start
        if opened.home is not None:
            self._restored(opened.home)
        else:
            self._count(step, opened.path)

    @_doing
    def steps(self, alike: bool = False) -> list[int]:
        """List the steps that can be restored; with ``alike`` those that the same number of ranks has saved."""
        self._saves.settle()
        steps: list[int] = self._courier.call("steps", alike)
        return steps

    def newest_step(self) -> int | None:
        """Find the newest step that can be loaded; see `AdapterAPI.newest_step`."""
        return self._close(self._find_verified(Search(NEWEST, others=True, remember=True)))

    def newest_alike(self) -> int | None:
        """Find the largest step that the number of ranks that saved it can load; see `AdapterAPI.newest_alike`."""
        reasons: dict[int, str] = {}
        for step in reversed(self.steps(alike=True)):
            why = self._why_not(step)
            if why is None:
                return step
            reasons[step] = why
        if reasons:
            raise Unrestorable(
                "there are checkpoints of this number of ranks, but none of them can be loaded", reasons=reasons
            )
        self._close(self._find(Search(NEWEST, others=True, checked=False)))  # raises if what exists cannot be used
        return None

    def _why_not(self, step: int) -> str | None:
        """Return why a step cannot be loaded on the number of ranks that saved it; None if it can."""
        try:
            loadable = self._close(self._find_verified(Search(WantedStep(step), remember=True)))
        except (CorruptSlot, StepNotFound, WorldSizeChanged) as error:  # the same on all ranks
            if self._ranks.rank == 0:
                log.warning("step %d cannot be loaded: %s", step, error)
            return str(error)
        return "it does not exist" if loadable is None else None

    # Choose

    def _find_verified(self, search: Search) -> Found:
        """Find the newest checkpoint that fits and of which every byte is verified, in memory or in the directory."""
        while isinstance(checkpoint := self._find(search), OpenInDirectory):
            with self._passing_over(checkpoint, search):
                self._verify_once(checkpoint)
                return checkpoint
            checkpoint.close()
        return checkpoint

    def _find(self, search: Search) -> Found:
        choice = self._choose(search)
        if not isinstance(choice, FoundInMemory):
            return choice
        start = time.perf_counter()
        checkpoint = self._ranks.on_all(without_collections(lambda: self._open(choice)))
        self._recorder.seconds["find and fetch"] += time.perf_counter() - start
        return checkpoint

    def _choose(self, search: Search) -> FoundInMemory | OpenInDirectory | None:
        """Choose a checkpoint; see `Session.choose`. One of a directory is opened."""
        start = self._began = time.perf_counter()
        self._saves.settle()
        self._drains.settle()
        self._saves.forget()
        self._in_memory, reuse = None, search.source is None
        try:
            while True:
                choice = self._courier.call("choose", search, reuse)
                if choice is None or isinstance(choice, FoundInMemory):
                    self._in_memory = choice
                    return choice
                reuse = False
                store = open_store(search.source or self._trainer.config.directory or "")
                try:
                    return OpenInDirectory(self._ranks, store, choice, search.broadcast)
                except CorruptSlot as error:  # the same on all ranks
                    self._pass_over(choice, str(error), search)
        finally:
            self._recorder.seconds["find and fetch"] += time.perf_counter() - start

    @contextlib.contextmanager
    def _passing_over(self, opened: OpenInDirectory, search: Search) -> Iterator[None]:
        """Pass over a checkpoint of the directory that is found to be damaged."""
        try:
            yield
        except CorruptSlot as error:  # the same on all ranks
            self._pass_over(opened.listed, opened.damage or str(error), search)

    def _pass_over(self, listed: Listed, why: str, search: Search) -> None:
        search.bad[listed.folder] = why
        if self._ranks.rank == 0:
            log.warning("%s cannot be restored from, so an older checkpoint is tried: %s", listed.folder, why)

    def _verify_once(self, drained: OpenInDirectory) -> None:
        """Read every byte of a checkpoint in the directory, once. Collective over the world. Raises CorruptSlot."""
        if drained.listed not in self._verified:
            drained.verify_together()
            self._verified.add(drained.listed)

    # Open what the courier has fetched

    def _open(self, choice: FoundInMemory) -> MemoryCheckpoint:
        slots, node, own = self._slots, self._ranks.node_index, None
        homes = {rank: open_home(self._trainer, file, choice.files) for rank, file in choice.homes.items()}
        if choice.own is not None:
            own = open_rank_checkpoint(slots.open, node, slots.holding(choice.own), choice.files)
            homes = {self._ranks.rank: own}
        return MemoryCheckpoint(choice.attempt, choice.step, choice.restores, homes, choice.files, own)

    def _compare(self, choice: FoundInMemory, state: Any) -> tuple[MemoryCheckpoint, Filling | None, bool]:
        """Open what was chosen in memory, and compare it with a state. Collective over the world.

        Returns:
            The checkpoint; what fills the state with it, None if ranks or shards are others, so that the state must be
            put together; and whether all ranks have objects of the same names.

        Raises:
            StructureMismatch: on all ranks, if the state of any does not match.
        """

        def prepare() -> tuple[MemoryCheckpoint, Filling | None]:
            checkpoint = self._open(choice)
            home = checkpoint.own
            if home is None:
                return checkpoint, None
            described, manifest = Described(), home.manifest
            comparison = Comparison(state, manifest.tree, manifest.entries, described)
            is_alike = not comparison.differences and not comparison.has_objects
            if not is_alike and reshard.only_shards_differ(state, home):
                return checkpoint, None
            comparison.refuse()
            filling = Filling(state, manifest.tree, manifest.entries, manifest.plain, home.reader(), described)
            return checkpoint, filling

        def numbers(prepared: tuple[MemoryCheckpoint, Filling | None]) -> list[int]:
            _, filling = prepared
            name = 0 if filling is None else name_of_objects(filling)
            return [int(filling is not None), name, -name]

        (checkpoint, filling), (is_alike, low, high) = self._ranks.together_least(
            without_collections(prepare),
            numbers,
            3,
            lambda why: StructureMismatch(f"the state could not be read: {why}"),
            choice.step,
        )
        return checkpoint, filling if is_alike else None, low == -high

    def _close(self, checkpoint: Found) -> int | None:
        if checkpoint is None:
            return None
        if isinstance(checkpoint, OpenInDirectory):
            checkpoint.close()
        else:
            self._slots.unmap_others(checkpoint.slots)
        return checkpoint.step

    # Load

    def _prepare_or_warn(self, state: Any) -> None:
        try:
            self._saves.prepare(state)
        except (MemoryTooSmall, StateError) as error:  # training may begin; each save reports this again
            if self._ranks.rank == 0:
                log.warning("the slots could not be made: %s", error)

    def _put_together(self, old: OpenCheckpoint, state: Any) -> int:
        """Restore what other ranks saved, or what is in other shards, or not in memory."""
        start = time.perf_counter()
        made: reshard.Resharded
        try:
            made = reshard.reshard(self._trainer, old, state)
        except MemoryTooSmall:  # on all ranks
            if not isinstance(old, OpenInDirectory):
                raise
            # What memory holds is of no use now. But delete it only for a checkpoint that is known to be whole.
            self._verify_once(old)
            made = reshard.reshard(self._trainer, old, state, gives_way=True)
        try:
            self._loading.fill(old.step, made.filling(state))
        except BaseException:  # after an interrupt, too
            self._slots.give_back(old)  # what was put together in them was not loaded
            raise
        self._recorder.seconds["load"] += time.perf_counter() - start
        reach("restore.loaded")
        reshard.protect(self._trainer, old, made)
        self._recorder.counts["drained restores" if isinstance(old, OpenInDirectory) else "resharded"] += 1
        self._count(old.step, old.path)
        return old.step

    def _load_drained(self, drained: OpenInDirectory) -> tuple[int, Any]:
        if drained.world_size != self._ranks.size:
            raise WorldSizeChanged("another number of ranks saved the checkpoint: restore(state) converts it to "
                                   "this number", step=drained.step, expected=f"{drained.world_size} ranks",
                                   found=self._ranks.size)  # fmt: skip
        manifest, read, wanted_parts = drained.state(self._ranks.rank)
        is_intact = drained.read(wanted_parts)
        self._loading.together(drained.step, lambda: _finish(is_intact, lambda: None))
        self._count(drained.step, drained.path)
        return drained.step, materialize(manifest.tree, manifest.entries, manifest.plain, read)

    def _hold_until_protected(self, home: RankCheckpoint) -> None:
        """Keep saves from writing the step before a step that was rolled forward: only that covers a lost node."""
        if self._in_memory is not None and self._in_memory.rolled_forward:
            self._courier.call("hold_older", self._number_of(home))

    def _restored(self, home: RankCheckpoint) -> int:
        self._slots.unmap_others(home.shares)
        reach("restore.loaded")
        step = home.header.step
        self._count(step, home=home)
        self._courier.post(self._courier.job("reprotect_restored", self._number_of(home)))
        return step

    def _count(self, step: int, path: str = "memory", home: RankCheckpoint | None = None) -> None:
        self._saves.last_step = self._drains.restored = step
        self._courier.call("restored", None if home is None else self._number_of(home))
        how = "" if home is not None else f", put together for {self._ranks.size} ranks"
        nbytes = 0 if home is None else home.header.extents.nbytes
        origin = path if self._in_memory is None else self._in_memory.restored_from
        self._recorder.restored(step, time.perf_counter() - self._began, path, origin, nbytes, how)

    def _number_of(self, home: RankCheckpoint) -> int:
        return next(number for number, slot in enumerate(self._slots.own) if slot is home.slot)


def without_collections(work: Callable[[], T]) -> Callable[[], T]:
    """Do work without looking for cycles meanwhile: it makes so many objects, and all of them stay.

    In a process with PyTorch each look takes as long as taking thousands of leaves apart.
    """

    @functools.wraps(work)
    def done() -> T:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return work()
        finally:
            if was_enabled:
                gc.enable()

    return done


def _finish(is_intact: bool, done: Callable[[], None]) -> None:
    if not is_intact:
        raise CorruptSlot("parts of the checkpoint did not arrive whole from other ranks")
    done()
