"""What adapters need of a Checkpointer besides its verbs: a framework plans before it writes, and may fail between."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from ..background_files.staged import BackgroundFiles
from ..config import Config
from ..draining.drains import Drains
from ..errors import MlflashError, StateError, StepOrderError, Unrestorable
from ..protocol.client import one_unit
from ..protocol.ranks import Ranks
from ..protocol.wanted_parts import WantedPart
from ..restoring.all_or_nothing import Loading
from ..restoring.open_in_memory import OpenCheckpoint
from ..restoring.restore import Restores
from ..saving.early_staging import StagedState
from ..saving.reserved_saves import ReservedSave
from ..saving.save_queue import SaveQueue
from ..saving.snapshot import Snapshot
from ..state.leaves import Flat
from .own_files import OwnFiles

log = logging.getLogger("mlflash")

T = TypeVar("T")


class Adapting:
    """The side of a Checkpointer that adapters use; `Checkpointer.adapting`.

    Attributes:
        ranks: its ranks.
    """

    def __init__(self, ranks: Ranks, saves: SaveQueue, restores: Restores, drains: Drains, config: Config,
                 check_open: Callable[[], None]):  # fmt: skip
        self._saves, self._restores, self._drains, self._check_open = saves, restores, drains, check_open
        self.ranks, self._strict, self._config = ranks, config.strict, config
        self._loading = Loading(ranks, saves)

    def _unit(self) -> contextlib.AbstractContextManager[None]:
        return self.ranks.unit()

    def own_files(self) -> OwnFiles:
        """Make what takes a framework's own checkpoints to memory, and from there to disk. Collective over comm.

        Together the ranks move as many bytes per second as they drain (``drain_rate``).

        Raises:
            UnsafePath: somebody else has the directory for it on some node.
        """
        run = self.ranks.broadcast(uuid.uuid4().hex[:8], 0)
        where, rank, size = self._config, self.ranks.rank, self.ranks.size
        files = self.ranks.together(
            lambda: BackgroundFiles(where.memory, where.job, run, rank, size, where.drain_rate / size),
            lambda text: StateError(f"checkpoints cannot be moved to disk in the background: {text}"),
        )
        return OwnFiles(files, self.ranks, self._strict)

    def seen_by_first(self, look: Callable[[], Any]) -> Any:
        """Let rank 0 look at what other ranks may see in another state, such as files, and tell all of them.

        Collective over comm.

        Args:
            look: called on rank 0 only, where this is called; what it returns is pickled.

        Raises:
            StateError: on the other ranks, where ``look`` has raised something on rank 0.
        """
        self._check_open()
        seen, problem = None, None
        if self.ranks.rank == 0:
            try:
                seen = look()
            except Exception as error:  # the others must not wait for us
                problem = error
        found, why = self.ranks.broadcast((seen, problem and repr(problem)), 0)
        if problem is not None:
            raise problem
        if why is not None:
            raise StateError(f"rank 0 could not read what all ranks need to know: {why}", rank=0)
        return found

    @one_unit
    def save_or_warn(
        self, step: int, state: Any, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> Snapshot | None:
        """Save as :meth:`.Checkpointer.save` does, from a framework's callback, where an exception would end training.

        Collective over comm, in that all ranks save the same steps in the same order; no rank waits for another.

        Args:
            step, state: see there.
            until: the framework's optimizers: if they are torch's, what they hold is copied while training goes on.
                Where the framework itself changes that elsewhere than in their steps, it calls `wait_staged` before.
                Or else why it is not safe to go by them, which the log says once. Default: there are none.
            owned: gives further tensors that change in those steps only, or after `wait_staged`.

        Returns:
            The snapshot. None where this rank cannot save this state or step: then no rank does, and it is a warning.

        Raises:
            StateError, StepOrderError, SaveFailed: only with ``strict``.
        """
        try:
            return self.save(step, state, until, owned)
        except (StateError, StepOrderError):  # its job is posted all the same, and says so
            if self._strict:
                raise
            return None

    @one_unit
    def save(
        self, step: int, state: Any, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> Snapshot:
        """Save as :meth:`.Checkpointer.save` does, copying later what :meth:`save_or_warn` does, and raise as it."""
        self._check_open()
        return self._saves.save(step, state, self._saves.lazy.until(until, owned))

    def stepped_optimizers(self) -> Sequence[Any] | str:
        """Give the torch optimizers that were heard to step, for ``until``, where those of a framework are not known.

        Not collective. What only they hold changes in their steps; a framework that writes to it elsewhere calls
        `wait_staged` before. From the first call on they are heard.
        """
        return self._saves.lazy.stepped()

    def wait_staged(self) -> None:
        """Copy what saves so far have left to be copied: then anything may change the state.

        Not collective. What a device still copies comes before all that its current stream is given from now on.
        """
        self._saves.lazy.steps.hold_back()

    @one_unit
    def newest_step(self, instead: object = None) -> int | None:
        """Find the newest step that can really be loaded, saved by whatever ranks: every byte of it is verified.

        Collective over comm. The newest is the one saved last: training may have gone back, and its step be smaller.
        Whoever chooses a step asks here: headers say what was saved, not what can be loaded. A load of this step that
        comes next does not verify it again.

        Args:
            instead: what training can go on from besides, such as a path, the same on all ranks; None: nothing. Where
                there is something, checkpoints that cannot be used are a warning.

        Returns:
            Its step; None where nothing was ever committed, or nothing can be used and there is something ``instead``.

        Raises:
            Unrestorable: checkpoints are there, none of them can be loaded, and there is nothing ``instead``.
        """
        self._check_open()
        return self._or_instead(self._restores.newest.step, instead)

    @one_unit
    def newest_alike(self, instead: object = None) -> int | None:
        """Find the largest step that can really be loaded on as many ranks as have saved it; see `newest_step`.

        Collective over comm.
        """
        self._check_open()
        return self._or_instead(self._restores.newest.step_alike, instead)

    def _or_instead(self, find: Callable[[], int | None], instead: object) -> int | None:
        try:
            return find()
        except Unrestorable as error:  # the same on all ranks
            self.go_on_instead(error, instead)
            return None

    def go_on_instead(self, error: Unrestorable, instead: object) -> None:
        """Warn that checkpoints which are there cannot be used, where training can go on from something else.

        Not collective.

        Args:
            error: says which, and why.
            instead: see `newest_step`.

        Raises:
            Unrestorable: the same, where there is nothing else.
        """
        if instead is None:
            raise error
        if self.ranks.rank == 0:
            log.warning("continuing from %s, because no checkpoint of mlflash can be used: %s", instead, error)

    def steps_alike(self) -> list[int]:
        """List the steps that can be loaded on as many ranks as have saved them, ascending.

        Collective over comm. Looks at headers only: `newest_alike` chooses one.
        """
        self._check_open()
        return self._restores.steps_alike()

    def begin(self, step: int, thread: threading.Thread) -> ReservedSave:
        """Say that a :meth:`save_again` comes, or not: where a thread goes on without it, it fails on all ranks.

        Collective over comm, in that all ranks begin the same saves in the same order; no rank waits for another.

        Args:
            step: training step, not smaller than the one before: the newest one may be saved once more.
            thread: which calls :meth:`save_again`, or waits for another process that has it called.
        """
        self._check_open()
        return self._saves.begin(step, thread)

    def end_begun(self) -> None:
        """Let those saves fail that were begun by threads which have gone on without them: this one, and dead ones.

        Not collective. All that is collective does so by itself.
        """
        self._check_open()
        self._saves.begun.end()

    @one_unit
    def save_again(self, state: Flat | StagedState | MlflashError, begun: ReservedSave) -> Snapshot:
        """Save leaves that an adapter made, as :meth:`.Checkpointer.save` does, as the step that was begun.

        Collective over comm, but a rank may not come to it: for the others it fails when that rank goes on.

        Args:
            state: leaves, which must not change before the snapshot has ended; or what :meth:`stage_ahead` gave; or why
                this rank cannot save: then no rank does.
            begun: what :meth:`begin` gave.

        Raises:
            SaveFailed: its thread had ended before.
        """
        self._check_open()
        return self._saves.save_again(state, begun)

    def stage_ahead(
        self, state: Flat, until: Sequence[Any] | str = (), owned: Callable[[], Iterable[Any]] = lambda: ()
    ) -> StagedState | None:
        """Copy leaves into a slot before their step is known, for :meth:`save_again`.

        Not collective. The snapshot's stall does not count this.

        Args:
            state: leaves.
            until, owned: see :meth:`save_or_warn`.

        Returns:
            What was staged; None where that would need other ranks: the first time, where the state has grown, or
            where something is staged ahead already.
        """
        self._check_open()
        return self._saves.stage_ahead(state, self._saves.lazy.until(until, owned))

    def give_up(self, ahead: StagedState) -> None:
        """Free the slot of what was staged ahead and is not going to be saved. Not collective."""
        self._saves.staged_states.give_up(ahead)

    def ask_drain(self) -> None:
        """Let the checkpoint that is saved next be drained, unlike :meth:`.Checkpointer.drain` without any wait.

        Not collective: the ranks agree on it with the commit. Where a drain is on its way then, a later one is taken.
        """
        self._check_open()
        self._drains.ask()

    @one_unit
    def open(
        self, step: int | None = None, told: Collection[str] = (), source: str | None = None
    ) -> OpenCheckpoint | None:
        """Open the newest checkpoint there is, saved by whatever ranks, to read any part of any tensor.

        Collective over comm. For adapters: what reads must do so in :meth:`read`, which closes it.

        Args:
            step: this one instead of the newest.
            told: names of small entries whose bytes every rank shall know.
            source: another directory that checkpoints were drained to: it is read only, and memory is not looked at.

        Returns:
            It; the newest is verified to the last byte, another one of the directory while it is read. None where
            nothing was ever committed.

        Raises:
            Unrestorable: see :meth:`.Checkpointer.restore`.
            StepNotFound: there is no such step, or it cannot be read; the text says why.
        """
        self._check_open()
        return self._restores.open(step, told, source)

    @one_unit
    def load_together(self, step: int, work: Callable[[], T], anew: bool = False) -> T:
        """Let a framework load into its objects what was restored or read: on all ranks, or on none.

        Collective over comm. An adapter does nothing with a checkpoint but in here, that may fail on one rank: else
        the others would train on, with a state that this rank does not have, or wait for it.

        Args:
            step: of the checkpoint.
            work: done where this is called. It may raise anything; where it waits for other ranks, they wait with it.
            anew: it changes nothing that training goes on from: it makes an object, or looks at something.

        Returns:
            What ``work`` gives.

        Raises:
            MlflashError: on all ranks, what went wrong on any; StructureMismatch for what is none of ours. The state is
                undefined then: saves refuse it until a restore, or this, has succeeded. It is not with ``anew``.
        """
        self._check_open()
        with contextlib.nullcontext() if anew else self._loading.changing(step):
            return self._loading.together(step, work)

    @property
    def undefined(self) -> str:
        """Why the state is undefined, as a load into it has failed; "" where it is not. Not collective."""
        return self._saves.undefined

    def loaded_elsewhere(self) -> None:
        """Say that the whole state was loaded from something else: after a load of ours that failed it may be saved.

        Not collective.
        """
        self._saves.undefined = ""

    @one_unit
    def read(
        self,
        opened: OpenCheckpoint,
        wanted: Callable[[], Iterable[WantedPart]],
        done: Callable[[], None],
        anew: bool = False,
    ) -> None:
        """Read out of an opened checkpoint, and close it; then its redundancy is made whole in the background.

        Collective over comm.

        Args:
            opened: what :meth:`open` gave.
            wanted: says which parts of which entries are wanted, and where.
            done: called when they are there.
            anew: they are wanted in memory of their own: nothing changes that training goes on from.

        Raises:
            StructureMismatch: on all ranks, where ``wanted`` or ``done`` failed on any.
            CorruptSlot: on all ranks, where a part did not arrive whole. After that, or where ``done`` failed, the
                state is undefined, as after :meth:`load_together`.
        """
        self._check_open()
        self._restores.read(opened, wanted, done, anew)
