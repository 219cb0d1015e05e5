"""The restores of this run: found, fetched, loaded together, and protected in the background.

An error on any rank is raised on all of them, so that no rank trains on from another step than the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import xxhash

from ..channel.client import TrainerContext
from ..channel.ranks import Ranks
from ..channel.records import FoundInMemory
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
from ..save.queue import SaveQueue
from ..state.rebuild import Filling, materialize, refuse_differences
from ..storage.store import open_store
from . import reshard
from .open_in_directory import OpenInDirectory
from .open_in_memory import FoundElsewhere, OpenCheckpoint, OpenInMemory, open_home

log = logging.getLogger("mlflash")

T = TypeVar("T")

_KEPT_NBYTES = 64 << 20  # of everything that a rank keeps to put it back
_UNDEFINED = ("the state that you gave is now undefined: restore again, or begin anew; save refuses until a "
              "restore succeeds")  # fmt: skip
Found = RankCheckpoint | FoundElsewhere | OpenInDirectory | None
_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


@dataclasses.dataclass(frozen=True)
class _Search:
    """What a restore looks for, and what it passes over."""

    wanted: WantedStep
    source: str | None = None
    others: bool = False  # whether another number of ranks may have saved it
    told: Collection[str] = ()  # names of entries whose bytes are needed of every rank
    checked: bool = True  # whether all of what is in memory is verified
    remember: bool = False  # whether the next search may take what this one has verified
    bad: dict[str, str] = dataclasses.field(default_factory=dict)  # folders to pass over, and why


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
            filling.fill_leaves()

        reach("restore.loading")
        before = self._saves.undefined
        self._saves.undefined = _half_loaded(step)  # it must stay undefined after an interrupt, too
        try:
            self.together(step, load_small)
            self.together(step, load_rest)
        except DeadlineExceeded:  # the ranks cannot agree on anything now
            raise
        except MlflashError as error:  # the same on all ranks
            whole = filling.put_back()
            if self._ranks.all_of(whole):
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
        small, left = set(), _KEPT_NBYTES
        for nbytes, path in sorted(zip(largest, sizes, strict=True)):
            left -= nbytes
            if left >= 0:
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

    def __init__(self, trainer: TrainerContext, saves: SaveQueue, drains: Drains):
        self._trainer, self._courier, self._saves, self._drains = trainer, trainer.courier, saves, drains
        self._ranks, self._recorder, self._slots = trainer.ranks, trainer.recorder, trainer.slots
        self._loading = Loading(trainer.ranks, saves)
        self._began = time.perf_counter()  # start of the current restore
        self._in_memory: FoundInMemory | None = None  # what the last search found there
        self._whole: set[Listed] = set()  # checkpoints of the directory of which every byte is verified

    @_doing
    def restore(self, state: Any, wanted: WantedStep, source: str | None = None) -> int | None:
        """Fill a state in place; see `Checkpointer.restore`."""
        self._saves.reservations.wait()
        self._saves.find_replicas(state)
        search = _Search(wanted, source, others=True)
        while isinstance(found := self._choose(search), OpenInDirectory):
            with contextlib.closing(found), self._passing_over(found, search):
                return self._put_together(found, state)
        if found is None:
            self._prepare_or_warn(state)
            return None
        opened, filling, has_same = self._compare(found, state)
        if isinstance(opened, RankCheckpoint) and filling is None:  # other shards
            home, opened = opened, self._as_elsewhere(opened, found.restores)
            self._courier.call("reprotect_first", self._number_of(home))
        if isinstance(opened, FoundElsewhere):
            return self._put_together(OpenInMemory(self._trainer, opened, checks=True), state)
        assert filling is not None
        start = time.perf_counter()
        self._hold_until_protected(opened)
        self._loading.fill(opened.header.step, filling, has_same)
        self._recorder.seconds["load"] += time.perf_counter() - start
        return self._restored(opened)

    def _compare(self, found: FoundInMemory, state: Any
                 ) -> tuple[RankCheckpoint | FoundElsewhere, Filling | None, bool]:  # fmt: skip
        """Open what was found in memory, and compare it with a state. Collective over the world.

        Returns:
            What was opened; what fills the state with it, None if ranks or shards are others, so that the state must be
            put together; and whether all ranks have objects of the same names.

        Raises:
            StructureMismatch: on all ranks, if the state of any does not match.
        """

        def look() -> tuple[RankCheckpoint | FoundElsewhere, Filling | None]:
            opened = self._open_found(found)
            if isinstance(opened, FoundElsewhere) or reshard.only_shards_differ(state, opened):
                return opened, None
            manifest = opened.manifest
            refuse_differences(state, manifest.tree, manifest.entries)
            return opened, Filling(state, manifest.tree, manifest.entries, manifest.plain, opened.reader())

        def numbers(looked: tuple[RankCheckpoint | FoundElsewhere, Filling | None]) -> list[int]:
            name = 0 if looked[1] is None else name_of_objects(looked[1])
            return [int(looked[1] is not None), name, -name]

        (opened, filling), (is_alike, low, high) = self._ranks.together_least(look, numbers, 3, _unreadable, found.step)
        return opened, filling if is_alike else None, low == -high

    def _as_elsewhere(self, home: RankCheckpoint, restores: int, same_ranks: bool = False) -> FoundElsewhere:
        return FoundElsewhere(home.header.attempt, home.header.step, restores, {self._ranks.rank: home}, home.files,
                              same_ranks)  # fmt: skip

    @_doing
    def load(self, wanted: WantedStep, source: str | None = None, copy: bool = True) -> tuple[int | None, Any]:
        """Return the state anew; see `Checkpointer.load`."""
        search = _Search(wanted, source, checked=copy)
        while isinstance(found := self._find(search), OpenInDirectory):
            with contextlib.closing(found), self._passing_over(found, search):
                return self._load_drained(found)
        if not isinstance(found, RankCheckpoint):
            return None, None
        reach("restore.loading")
        home = found
        self._hold_until_protected(home)

        def build() -> Any:
            read_from, manifest = home, home.manifest
            if not copy:
                lend = self._slots.lend
                shares = [lend(share) for share in home.shares]
                read_from = RankCheckpoint(lend(home.slot), manifest, shares, home.files)
            return materialize(manifest.tree, manifest.entries, manifest.plain, read_from.reader(), copy)

        state = self._ranks.together(build, lambda why: MlflashError(f"loading failed: {why}"), home.header.step)
        return self._restored(home), state

    @_doing
    def open(self, step: int | None, told: Collection[str], source: str | None = None) -> OpenCheckpoint | None:
        """Open a checkpoint to read any part of it; see `AdapterAPI.open`."""
        find = self._find_whole if step is None else self._find
        found = find(_Search(WantedStep(step), source, others=True, told=told))
        if found is None or isinstance(found, OpenInDirectory):
            return found
        if isinstance(found, RankCheckpoint):
            self._courier.call("reprotect_first", self._number_of(found))
            restores = 0 if self._in_memory is None else self._in_memory.restores
            found = self._as_elsewhere(found, restores, same_ranks=True)
        return OpenInMemory(self._trainer, found, told=told)

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
                whole = opened.read(wanted_parts)
                self._loading.together(step, lambda: _finish(whole, done))
        finally:
            opened.close()
        self._recorder.seconds["load"] += time.perf_counter() - start
        if opened.home is not None:
            self._restored(opened.home)
            return
        self._count(step, opened)

    @_doing
    def steps(self, alike: bool = False) -> list[int]:
        """List the steps that can be restored; with ``alike`` those that the same number of ranks has saved."""
        self._saves.settle()
        steps: list[int] = self._courier.call("steps", alike)
        return steps

    def newest_step(self) -> int | None:
        """Find the newest step that can be loaded; see `AdapterAPI.newest_step`."""
        return self._close(self._find_whole(_Search(NEWEST, others=True, remember=True)))

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
        self._close(self._find(_Search(NEWEST, others=True, checked=False)))  # raises if what exists cannot be used
        return None

    def _why_not(self, step: int) -> str | None:
        """Return why a step cannot be loaded on the number of ranks that saved it; None if it can."""
        try:
            found = self._close(self._find_whole(_Search(WantedStep(step), remember=True)))
        except (CorruptSlot, StepNotFound, WorldSizeChanged) as error:  # the same on all ranks
            if self._ranks.rank == 0:
                log.warning("step %d cannot be loaded: %s", step, error)
            return str(error)
        return "it does not exist" if found is None else None

    def _verify_once(self, drained: OpenInDirectory) -> None:
        """Read every byte of a checkpoint in the directory, once. Collective over the world. Raises CorruptSlot."""
        if drained.listed not in self._whole:
            drained.verify_together()
            self._whole.add(drained.listed)

    def _close(self, found: Found) -> int | None:
        if isinstance(found, OpenInDirectory):
            found.close()
        elif found is not None:
            for home in [found] if isinstance(found, RankCheckpoint) else found.homes.values():
                self._slots.unmap_others([home.slot, *home.shares])
        if isinstance(found, RankCheckpoint):
            return found.header.step
        return None if found is None else found.step

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
            reshard.give_up(self._trainer, old)
            raise
        self._recorder.seconds["load"] += time.perf_counter() - start
        reach("restore.loaded")
        reshard.protect(self._trainer, old, made)
        self._recorder.counts["drained restores" if isinstance(old, OpenInDirectory) else "resharded"] += 1
        self._count(old.step, old)
        return old.step

    def _load_drained(self, found: OpenInDirectory) -> tuple[int, Any]:
        if found.world_size != self._ranks.size:
            raise WorldSizeChanged("another number of ranks saved the checkpoint: restore(state) converts it to "
                                   "this number", step=found.step, expected=f"{found.world_size} ranks",
                                   found=self._ranks.size)  # fmt: skip
        manifest, read, wanted_parts = found.state(self._ranks.rank)
        whole = found.read(wanted_parts)
        self._loading.together(found.step, lambda: _finish(whole, lambda: None))
        self._count(found.step, found)
        return found.step, materialize(manifest.tree, manifest.entries, manifest.plain, read)

    def _find(self, search: _Search) -> Found:
        found = self._choose(search)
        if not isinstance(found, FoundInMemory):
            return found
        start = time.perf_counter()
        opened = self._ranks.on_all(lambda: self._open_found(found))
        self._recorder.seconds["find and fetch"] += time.perf_counter() - start
        return opened

    def _choose(self, search: _Search) -> FoundInMemory | OpenInDirectory | None:
        """Choose a checkpoint; see `Session.choose`. One of a directory is opened."""
        start = self._began = time.perf_counter()
        self._saves.settle()
        self._drains.settle()
        self._saves.forget()
        self._in_memory, again = None, search.source is None
        while True:
            found = self._courier.call("choose", search.wanted, search.others, search.source, search.bad,
                                       search.checked, again, search.remember)  # fmt: skip
            if found is None or isinstance(found, FoundInMemory):
                self._recorder.seconds["find and fetch"] += time.perf_counter() - start
                self._in_memory = found
                return found
            again = False
            store = open_store(search.source or self._trainer.config.directory or "")
            try:
                return OpenInDirectory(self._ranks, store, found, search.told)
            except CorruptSlot as error:  # the same on all ranks
                self._pass_over(found, str(error), search)
            finally:
                self._recorder.seconds["find and fetch"] += time.perf_counter() - start

    def _open_found(self, found: FoundInMemory) -> RankCheckpoint | FoundElsewhere:
        slots, node = self._slots, self._ranks.node_index
        if found.own is not None:
            return open_rank_checkpoint(slots.open, node, slots.holding(found.own), found.files)
        homes = {rank: open_home(self._trainer, file, found.files) for rank, file in found.homes.items()}
        return FoundElsewhere(found.attempt, found.step, found.restores, homes, found.files)

    @contextlib.contextmanager
    def _passing_over(self, opened: OpenInDirectory, search: _Search) -> Iterator[None]:
        """Pass over a checkpoint of the directory that is found to be damaged."""
        try:
            yield
        except CorruptSlot as error:  # the same on all ranks
            self._pass_over(opened.listed, opened.damage or str(error), search)

    def _pass_over(self, listed: Listed, why: str, search: _Search) -> None:
        search.bad[listed.folder] = why
        if self._ranks.rank == 0:
            log.warning("%s cannot be restored from, so an older checkpoint is tried: %s", listed.folder, why)

    def _find_whole(self, search: _Search) -> Found:
        """Find the newest checkpoint that fits and of which every byte is verified, in memory or in the directory."""
        while isinstance(found := self._find(search), OpenInDirectory):
            with self._passing_over(found, search):
                self._verify_once(found)
                return found
            found.close()
        return found

    def _restored(self, home: RankCheckpoint) -> int:
        self._slots.unmap_others(home.shares)
        reach("restore.loaded")
        step, own = home.header.step, self._number_of(home)
        self._count(step, home, own)
        self._courier.post(self._courier.job("reprotect_restored", own))
        return step

    def _number_of(self, home: RankCheckpoint) -> int:
        return next(number for number, slot in enumerate(self._slots.own) if slot is home.slot)

    def _count(self, step: int, source: object, own: int | None = None) -> None:
        self._saves.last_step = self._drains.restored = step
        self._courier.call("restored", own)
        where = source.path if isinstance(source, OpenInDirectory) else "memory"
        how = "" if isinstance(source, RankCheckpoint) else f", put together for {self._ranks.size} ranks"
        nbytes = source.slot.header.extents.nbytes if isinstance(source, RankCheckpoint) and source.slot.header else 0
        in_memory = "" if self._in_memory is None else self._in_memory.restored_from
        came_from = source.path if isinstance(source, OpenInDirectory) else in_memory
        self._recorder.restored(step, time.perf_counter() - self._began, where, came_from, nbytes, how)

    def _hold_until_protected(self, home: RankCheckpoint) -> None:
        """Keep saves from writing the step before a step that was rolled forward: only that covers a lost node."""
        if self._in_memory is not None and self._in_memory.rolled_forward:
            self._courier.call("hold_older", self._number_of(home))


def _unreadable(why: str) -> StructureMismatch:
    return StructureMismatch(f"the state could not be read: {why}")


def _finish(whole: bool, done: Callable[[], None]) -> None:
    if not whole:
        raise CorruptSlot("parts of the checkpoint did not arrive whole from other ranks")
    done()
