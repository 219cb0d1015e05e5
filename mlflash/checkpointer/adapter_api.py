"""What adapters need besides the public methods of a Checkpointer: frameworks plan before they write, and may fail."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..channel.client import TrainerState, restart_scope
from ..channel.ranks import Ranks
from ..channel.wanted_parts import WantedPart
from ..drain.drain_handle import Drains
from ..errors import MlflashError, SaveFailed, StateError, StepOrderError, Unrestorable
from ..framework_files.background_files import BackgroundFiles
from ..restore.load import Loading, Restores
from ..restore.open_in_memory import OpenCheckpoint
from ..save.save_queue import ReservedSave, SaveQueue
from ..save.snapshot import Snapshot
from ..save.stage import StagedState
from ..state.leaves import Flat

log = logging.getLogger("mlflash")

T = TypeVar("T")


class OwnFiles:
    """A framework's own checkpoints of one training: it writes them to memory, and they are moved to disk. Close it."""

    def __init__(self, files: BackgroundFiles, ranks: Ranks, strict: bool):
        self._files, self._ranks, self._strict = files, ranks, strict
        self._later: list[Callable[[], None]] = []
        self._coming: set[str] = set()  # on their way to disk; `_going`: to be deleted after that
        self._going: set[str] = set()
        self.replaced = contextlib.ExitStack()  # gives back the methods of the framework that an adapter has replaced

    def begin(self, target: str) -> bool:
        """Whether all ranks can write the next checkpoint to memory; otherwise the framework writes it to disk itself.

        The framework also writes to disk if a directory of this name already exists: it writes the newer files into
        that. This call waits until the previous checkpoint is on disk, and then runs what was postponed until then.
        Collective over comm.

        Raises:
            SaveFailed: with ``strict``, on all ranks, if the previous checkpoint was not moved on some of them.
        """
        agreed = self._ranks.agree(all_of={
            "has_room": self._files.has_room(), "is_well": self._is_well(),
            "is_new": self._ranks.rank != 0 or not os.path.isdir(target),
        })  # fmt: skip
        if self._strict and not agreed.is_well:
            raise SaveFailed("a checkpoint of the framework was not moved to disk: the log says why")
        self._do_later()
        if not agreed.has_room and self._ranks.rank == 0:
            log.warning(
                "memory has no room, or the process that moves files has ended: the framework writes %s to disk itself",
                target,
            )
        return bool(agreed.has_room and agreed.is_new)

    @contextlib.contextmanager
    def directory(self, target: str | os.PathLike[str], notes: Mapping[str, str] | None = None, alone: bool = False
                  ) -> Iterator[Path]:  # fmt: skip
        """Return a directory to write to in place of another one; see `BackgroundFiles.directory`.

        Inside, `torch.save` makes no checksums, which take most of its time: the files get them while they are moved to
        disk. Not collective, but all ranks that have a part of it write the same ones in the same order.
        """
        with _without_checksums() as checks, self._files.directory(target, notes, alone, checks) as path:
            yield path

    def link(self, path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
        """Make a link once everything that was written so far is on disk. Not collective, and for one rank only."""
        self._files.link(path, to)

    def expect(self, path: str | os.PathLike[str]) -> None:
        """Note on a rank that a path is being moved to disk, until somebody waits for it."""
        self._coming.add(os.path.abspath(path))

    def expects(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path is being moved to disk."""
        return os.path.abspath(path) in self._coming

    def would_be_there(self, path: str | os.PathLike[str], is_there: Callable[[], bool]) -> bool:
        """Whether a path would exist if all writes and deletions had ended. Collective as ``is_there`` is."""
        return self.expects(path) or (os.path.abspath(path) not in self._going and is_there())

    def remove_when_moved(self, path: str | os.PathLike[str], remove: Callable[[], None]) -> None:
        """Delete something once everything that was written so far is on disk, see `when_moved`."""
        self._going.add(os.path.abspath(path))
        self.when_moved(remove)

    def when_moved(self, do: Callable[[], None]) -> None:
        """Run a function once all that was written is on disk: the next time that somebody waits for it."""
        self._later.append(do)

    def finish(self) -> None:
        """Wait until everything that was written is on disk, and run what was postponed until then. Not collective."""
        self._files.wait()
        self._is_well()
        self._do_later()

    def close(self) -> None:
        """Close without waiting: the rest is still moved in the background. Not collective."""
        self.replaced.close()
        self._files.close()

    def _is_well(self) -> bool:
        failed = self._files.failures()
        for target, why in failed.items():
            log.warning("%s was not moved to disk: %s", target, why)
        if failed:
            self._later.clear()  # older checkpoints are kept then
        return not failed

    def _do_later(self) -> None:
        self._coming.clear()
        self._going.clear()
        later, self._later = self._later, []
        for do in later:
            do()


@contextlib.contextmanager
def _without_checksums() -> Iterator[bool]:
    """Keep `torch.save` from making checksums; yields whether it would have made them."""
    torch: Any = sys.modules.get("torch")
    serialization: Any = getattr(torch, "serialization", None)
    if not hasattr(serialization, "set_crc32_options") or not serialization.get_crc32_options():
        yield False
        return
    serialization.set_crc32_options(False)
    try:
        yield True
    finally:
        serialization.set_crc32_options(True)


class AdapterAPI:
    """The methods of a Checkpointer that adapters use: `Checkpointer.adapting`."""

    def __init__(self, trainer: TrainerState, saves: SaveQueue, restores: Restores, drains: Drains,
                 check_open: Callable[[], None]):  # fmt: skip
        self._saves, self._restores, self._drains, self._check_open = saves, restores, drains, check_open
        self.ranks, self._courier, self._config = trainer.ranks, trainer.courier, trainer.config
        self._recorder = trainer.recorder
        self._loading = Loading(trainer.ranks, saves)

    def own_files(self) -> OwnFiles:
        """Make what writes a framework's own checkpoints to memory and then to disk. Collective over comm."""
        run = self.ranks.broadcast(uuid.uuid4().hex[:8], 0)
        where, rank, size = self._config, self.ranks.rank, self.ranks.size
        files = self.ranks.together(
            lambda: BackgroundFiles(where.memory, where.job, run, rank, size, where.drain_rate / size),
            lambda text: StateError(f"checkpoints cannot be moved to disk in the background: {text}"),
        )
        return OwnFiles(files, self.ranks, self._config.strict)

    def seen_by_first(self, look: Callable[[], Any]) -> Any:
        """Let rank 0 read what other ranks might see in another state, such as files, and send it to all of them.

        Collective over comm.

        Raises:
            StateError: on the other ranks, if ``look`` raised something on rank 0.
        """
        self._check_open()
        seen, problem = None, None
        if self.ranks.rank == 0:
            try:
                seen = look()
            except Exception as error:  # other ranks must not wait for this one
                problem = error
        seen, why = self.ranks.broadcast((seen, problem and repr(problem)), 0)
        if problem is not None:
            raise problem
        if why is not None:
            raise StateError(f"rank 0 could not read what all ranks need to know: {why}", rank=0)
        return seen

    @restart_scope
    def save_or_warn(
        self, step: int, state: Any, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> Snapshot | None:
        """Save as :meth:`.Checkpointer.save` does, in a framework's callback, where an exception would end training.

        Collective over comm in the sense that all ranks save the same steps in the same order; no rank waits for
        another.

        Args:
            until: the framework's optimizers. If they are torch optimizers, what they hold is copied while training
                continues. If the framework changes it outside their steps, the framework must call `wait_staged` before
                that. Or a text that says why this is not safe; the log says it once. Default: no optimizers.
            owned: returns further tensors that change only in those steps, or after `wait_staged`.

        Returns:
            The snapshot. None if this rank cannot save this state or step: then no rank does, and a warning is logged.

        Raises:
            StateError, StepOrderError, SaveFailed: only with ``strict``.
        """
        try:
            return self.save(step, state, until, owned)
        except (StateError, StepOrderError):  # the job was posted nevertheless, and reports the error
            if self._config.strict:
                raise
            return None

    @restart_scope
    def save(
        self, step: int, state: Any, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> Snapshot:
        """Save and raise as :meth:`.Checkpointer.save` does; copy later what :meth:`save_or_warn` copies later."""
        self._check_open()
        return self._saves.save(step, state, self._saves.lazy.until(until, owned))

    def stepped_optimizers(self) -> Sequence[Any] | str:
        """Return the torch optimizers that were heard to step, for ``until``, if those of a framework are not known.

        Not collective. What only they hold changes in their steps. A framework that writes to it elsewhere must call
        `wait_staged` before that. mlflash hears the steps from the first call on.
        """
        return self._saves.lazy.stepped()

    def wait_staged(self) -> None:
        """Copy what the saves so far have left to be copied; afterwards anything may change the state.

        Not collective. If a device is still copying, its current stream runs these copies before everything that it is
        given from now on.
        """
        self._saves.lazy.steps.hold_back()

    @restart_scope
    def newest_step(self, instead: object = None) -> int | None:
        """Find the newest step that can really be loaded, whichever ranks saved it: every byte of it is verified.

        Collective over comm. The newest step is the one that was saved last. Its number may be smaller than another
        one, because training may have gone back. Always ask here before you choose a step: headers say what was saved,
        not what can be loaded. If you load this step next, it is not verified again.

        Args:
            instead: what else training can continue from, such as a path; the same on all ranks. None: nothing. If
                there is something else, checkpoints that cannot be used are only a warning.

        Raises:
            Unrestorable: there are checkpoints, none of them can be loaded, and ``instead`` is None.
        """
        self._check_open()
        return self._or_instead(self._restores.newest_step, instead)

    @restart_scope
    def newest_alike(self, instead: object = None) -> int | None:
        """Find the largest step that the number of ranks that saved it can really load. Collective over comm."""
        self._check_open()
        return self._or_instead(self._restores.newest_alike, instead)

    def _or_instead(self, find: Callable[[], int | None], instead: object) -> int | None:
        try:
            return find()
        except Unrestorable as error:  # the same on all ranks
            self.go_on_instead(error, instead)
            return None

    def go_on_instead(self, error: Unrestorable, instead: object) -> None:
        """Warn that the existing checkpoints cannot be used, if training can continue from something else."""
        if instead is None:
            raise error
        if self.ranks.rank == 0:
            log.warning("continuing from %s, because no checkpoint of mlflash can be used: %s", instead, error)

    def steps_alike(self) -> list[int]:
        """List the steps that can be loaded on the number of ranks that saved them, ascending.

        Collective over comm. It reads headers only: `newest_alike` chooses one.
        """
        self._check_open()
        return self._restores.steps(alike=True)

    def begin(self, step: int, thread: threading.Thread) -> ReservedSave:
        """Announce that a :meth:`save_again` follows. If the thread continues without it, the save fails on all ranks.

        Collective over comm in the sense that all ranks begin the same saves in the same order; no rank waits for
        another.

        Args:
            thread: the thread that calls :meth:`save_again`, or that waits for another process which makes it call
                that.
        """
        self._check_open()
        return self._saves.begin(step, thread)

    def end_reservations(self) -> None:
        """Fail the saves that were begun by this thread or by dead threads, if these have not come back to them."""
        self._check_open()
        self._saves.reservations.end()

    @restart_scope
    def save_again(self, state: Flat | StagedState | MlflashError, reservation: ReservedSave) -> Snapshot:
        """Save leaves that an adapter made, as :meth:`.Checkpointer.save` does, as the step that was begun.

        Collective over comm, but a rank may leave it out: then the save fails on the others as soon as that rank
        continues.

        Args:
            state: leaves, which must not change before the snapshot has ended; or what :meth:`stage_early` returned; or
                the reason why this rank cannot save, and then no rank does.

        Raises:
            SaveFailed: its thread had already ended.
        """
        self._check_open()
        return self._saves.save_again(state, reservation)

    def stage_early(
        self, state: Flat, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> StagedState | None:
        """Copy leaves into a slot before their step is known, for :meth:`save_again`.

        Not collective. The snapshot's stall does not count this.

        Returns:
            What was staged. None if this would need other ranks: the first time, if the state has grown, or if
            something is already staged early.
        """
        self._check_open()
        return self._saves.stage_early(state, self._saves.lazy.until(until, owned))

    def give_up(self, early: StagedState) -> None:
        """Free the slot of a state that was staged early and will not be saved. Not collective."""
        self._saves.staged_states.give_up(early)

    def ask_drain(self) -> None:
        """Ask for a drain of the checkpoint that is saved next, without waiting as :meth:`.Checkpointer.drain` does.

        Not collective: the ranks agree on it with the commit. If a drain is running at that time, a later checkpoint is
        drained.
        """
        self._check_open()
        self._drains.ask()

    @property
    def newest_drained(self) -> int | None:
        """The step of this run's newest drain, if that has ended well. Not collective."""
        return self._drains.drained

    @restart_scope
    def open(
        self, step: int | None = None, told: Collection[str] = (), source: str | None = None
    ) -> OpenCheckpoint | None:
        """Open the newest checkpoint, whichever ranks saved it, to read any part of any tensor.

        Collective over comm. For adapters: read it only with :meth:`read`, which closes it.

        Args:
            told: names of small entries whose bytes every rank needs.
            source: another directory that checkpoints were drained to. It is only read, and memory is not used.

        Returns:
            The open checkpoint. Every byte of the newest one is verified; another one in the directory is verified
            while it is read. None if nothing was ever committed.

        Raises:
            Unrestorable: see :meth:`.Checkpointer.restore`.
            StepNotFound: there is no such step, or it cannot be read; the text says why.
        """
        self._check_open()
        return self._restores.open(step, told, source)

    @restart_scope
    def load_together(self, step: int, work: Callable[[], T], anew: bool = False) -> T:
        """Let a framework load what was restored or read into its objects: on all ranks, or on none.

        Collective over comm. Adapters must do everything with a checkpoint that may fail on one rank in here. Otherwise
        the other ranks would train on with a state that this rank does not have, or would wait for it.

        Args:
            work: called inside this call. It may raise anything. If it waits for other ranks, they wait with it.
            anew: ``work`` changes nothing that training continues from: it makes an object, or only reads.

        Raises:
            MlflashError: on all ranks, what went wrong on any of them; StructureMismatch if it was not an error of
                mlflash. The state is undefined then, and saves refuse it until a restore, or this call, succeeds. With
                ``anew`` it stays defined.
        """
        self._check_open()
        with contextlib.nullcontext() if anew else self._loading.changing(step):
            return self._loading.together(step, work)

    @property
    def undefined(self) -> str:
        """Why the state is undefined, because a load into it failed; "" if it is defined. Not collective."""
        return self._saves.undefined

    def loaded_elsewhere(self) -> None:
        """Note that the whole state was loaded from something else: after a failed load, it may be saved again."""
        self._saves.undefined = ""

    def must_restore(self, why: str) -> None:
        """Note that the state is undefined. Saves refuse it until a restore, `load_together` or `loaded_elsewhere`."""
        self._saves.undefined = why

    def recovered(self, step: int, seconds: float) -> None:
        """Note that this rank trains again from a step, so many seconds after it learned that another one was lost."""
        self._recorder.recovered(step, seconds)

    @restart_scope
    def read(
        self,
        opened: OpenCheckpoint,
        wanted: Callable[[], Iterable[WantedPart]],
        done: Callable[[], None],
        anew: bool = False,
    ) -> None:
        """Read from an opened checkpoint and close it; then lost copies and parity are made again in the background.

        Collective over comm.

        Args:
            wanted: returns which parts of which entries this rank needs, and where they go.
            done: called when they have arrived.
            anew: the parts go to memory of their own: nothing changes that training continues from.

        Raises:
            StructureMismatch: on all ranks, if ``wanted`` or ``done`` failed on any of them.
            CorruptSlot: on all ranks, if a part did not arrive whole. After that, or if ``done`` failed, the state is
                undefined, as after :meth:`load_together`.
        """
        self._check_open()
        self._restores.read(opened, wanted, done, anew)
