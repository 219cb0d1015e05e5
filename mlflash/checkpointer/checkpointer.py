"""The facade: one object that saves, restores and waits."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .. import config
from ..channel import connection
from ..channel.client import FORKED, Client, TrainerState, restart_scope
from ..channel.ranks import Ranks, check_torch_rank, replicas_of, some_ranks
from ..channel.records import Start, Started
from ..config import Config
from ..drain.drain_handle import Drain, Drains
from ..errors import Closed, MlflashError, StepNotFound
from ..memory.copy_threads import CopyThreads
from ..memory.inventory import WantedStep
from ..memory.node_directory import NodeDirectory, jobs_of
from ..memory.own_slots import OwnSlots
from ..restore.load import Restores
from ..save.save_queue import SaveQueue
from ..save.snapshot import Snapshot
from ..state.manifest import provenance_of
from ..telemetry.heartbeat import RankFacts, TrainerHeartbeat, read_heartbeats
from ..telemetry.metrics import Metrics, NodeMetrics, targets_of
from ..telemetry.otlp import Exporter
from ..telemetry.recorder import EventLog, TrainerRecorder, file_of_node
from ..version import loaded_versions, not_run_with
from . import light_saves, off, process_end
from .adapter_api import AdapterAPI

log = logging.getLogger("mlflash")

joined: list[Callable[[Checkpointer], None]] = []
"""Called with each Checkpointer that was made. In a round of `keep_alive` there is one function."""


class Checkpointer:
    """Saves the state of a training job in the memory of its nodes, and restores it after a failure.

    Making one is collective over ``comm``, or over ``process_group`` without ``comm``. The first one without ``comm``
    is collective over all ranks, unless you called ``init_process_group`` of `mlflash.adapters.distributed`. Use it as
    a context manager, or call :meth:`close`.

    Args:
        directory: path on the parallel file system, or a URL that fsspec knows, to drain checkpoints to and restore
            them from. It also gives the job a name if nothing else does.
        comm: mpi4py communicator of the ranks that save together. The couriers' own MPI connects them; one broadcast
            over ``comm`` carries an address. None: all ranks of the launcher, or this process alone if there is none.
        domains: which nodes can be lost together. Either the path of a file whose lines contain a host (or host list)
            and its domains, outermost first; or a mapping from host to domain or tuple of domains. mlflash spreads the
            nodes of a redundancy group over them. Default: ``MLFLASH_DOMAINS``, then what Slurm knows about the nodes.
        replicated: the ranks that hold the same state as this one: an mpi4py communicator or group, a torch.distributed
            process group, a list of ranks, or True for all; or a mapping from patterns of entry names to these. What
            they hold alike is stored once per node, and is not sent if it is on more nodes than may be lost. The ranks
            compare it at every step. If it differs, the step fails with a warning that names tensors and ranks. With
            ``share=False`` it is only compared. mlflash sends nothing over the group that you give. Default: the
            replicas that the placements of DTensors show, in the state of the first `restore` or `prepare`.
        process_group: the torch.distributed group that has the ranks of ``comm``. Without ``comm``: the ranks of the
            job that this Checkpointer is for. mlflash sends nothing over it. Default: all ranks.
        settings: the fields of :class:`mlflash.config.Config` by name, such as ``redundancy="xor:8"`` and
            ``drain_every=10``; docs/using.md has a table of them. None: not given. With ``enabled=False`` no method
            does anything, nothing is collective, no setting is checked, and MPI is not started.

    Attributes:
        enabled: whether mlflash does anything.
        adapting: the methods that only adapters need.

    Raises:
        ConfigError: a setting is missing or makes no sense.
        JobInUse: another live job uses this name on one of the nodes.
        MpiUnavailable, WorldMismatch: MPI cannot be loaded, or disagrees with the launcher or torch.distributed.
        UnsafePath: the job's directory in memory is not private to this user.
        MemoryTooSmall: ``reserve`` does not fit into memory.
        DeadlineExceeded: some ranks did not make their Checkpointer in time.
    """

    adapting: AdapterAPI
    enabled: bool
    _light: light_saves.LightSaves | None = None
    _trainer: TrainerState
    _courier: Client
    _drains: Drains
    _saves: SaveQueue
    _restores: Restores

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, comm: Any = None, domains: Any = None,
        replicated: Any = None, process_group: Any = None, **settings: Any,
    ):  # fmt: skip
        self._open(config.from_environment(os.environ, directory, **settings), comm, process_group, replicated, domains)
        if self.enabled and self._config.light:
            try:
                self._light = light_saves.add_to(self, comm, process_group, replicated, domains)
            except BaseException:  # the caller gets no object that it could close
                self._end(abandon=True, state="failed")
                raise
        for join in joined:
            join(self)

    def _open(self, settings: Config, comm: Any, process_group: Any, replicated: Any, domains: Any) -> None:
        self._config = settings
        self.enabled = self._config.enabled
        self._closed = "" if self.enabled else "off"  # why calls are refused; if it is off, nothing has to be closed
        self._is_ended = not self.enabled
        self._is_unused = True  # whether nothing copies into its slots any more, once it is ended
        if self.enabled:
            self._start(comm, process_group, replicated, domains)
        else:
            off.turned_off(self.enabled, comm)  # says so
            disabled: Any = off.Disabled(comm)
            self._courier = self._drains = self._saves = self._restores = self.adapting = disabled

    def _start(self, comm: Any, process_group: Any, replicated: Any, domains: Any) -> None:
        process_end.show_briefly()
        self._trainer, self._drains, started = _connect(self._config, comm, process_group, replicated, domains)
        trainer, self._courier = self._trainer, self._trainer.courier
        process_end.is_of_rank(trainer.ranks.rank)
        if trainer.ranks.rank == 0:
            for name in config.unknown_variables(os.environ):
                log.warning("the environment sets %s, which is no setting of mlflash", name)
        self._saves = SaveQueue(trainer)
        self._restores = Restores(trainer, self._saves, self._drains)
        self.adapting = AdapterAPI(trainer, self._saves, self._restores, self._drains, self._check_open)
        process_end.add(
            self, lambda me, state: me._end_alone(state, "this Checkpointer was left open"), Checkpointer._leave
        )
        try:
            trainer.recorder.started({**started.facts, "courier": self._courier.is_a}, lambda: self.survives)
            if self._config.reserve and not started.unusable:  # unusable files may be needed again, with that room
                self._saves.reserve(self._config.reserve)
        except BaseException:  # the caller gets no object that it could close
            self._end(abandon=True, state="failed")
            raise

    # Saving

    @restart_scope
    def save(self, step: int, state: Any, *, until: Any = None) -> Snapshot:
        """Copy the state into this rank's slot; it is then protected and committed in the background.

        Collective over comm in the sense that all ranks save the same steps in the same order. No rank waits for
        another here, unless all slots are busy or the state has grown. You may change ``state`` when it returns.

        Args:
            step: training step, 0 or more, larger than the one before.
            state: nested dicts, lists and tuples of tensors, arrays, plain values, and objects with ``state_dict`` and
                ``load_state_dict``.
            until: torch optimizers. What they hold is copied while training continues, until one of them steps. The
                save fails if something else writes to it before it is copied.

        Returns:
            The snapshot. Its ``wait()`` returns when the snapshot is committed.

        Raises:
            StepOrderError: the step is not larger than the one before. Its save fails on the other ranks, too.
            StateError: a leaf cannot be saved (its path is named); or a failed restore left the state undefined.
            SaveFailed: only with ``strict``: this save, or an earlier one in the background, failed.
        """
        self._check_open()
        if self._light is not None:
            return self._light.save(step, state, until)
        return self._saves.save(step, state, until)

    def wait(self) -> None:
        """Wait until every save so far is committed or has failed.

        Not collective.

        Raises:
            SaveFailed, DeadlineExceeded: only with ``strict``.
        """
        self._check_open()
        self._saves.wait()
        if self._light is not None:
            self._light.lane.wait()

    @restart_scope
    def prepare(self, state: Any) -> None:
        """Allocate the slots for a state like this one before the first save; their pages are made in the background.

        Collective over comm. Leaves that an adapter made are accepted, too.

        Raises:
            MemoryTooSmall: the slots do not fit into the node's memory; nothing was allocated.
            StateError: a leaf cannot be saved.
        """
        self._check_open()
        self._saves.prepare(state)

    # Restoring

    @restart_scope
    def restore(
        self, state: Any, step: int | None = None, *, before: int | None = None, certified: bool = False,
        source: str | os.PathLike[str] | None = None,
    ) -> int | None:  # fmt: skip
        """Fill the state, in place, with the newest step that memory or the directory has.

        Collective over comm. All ranks verify every byte before anything is changed. After the restore, lost copies and
        parity are made again in the background. Slots are made as by :meth:`prepare`, even if nothing is restored.

        If another number of ranks saved the checkpoint, or saved it in other shards, each tensor is put together from
        the old shards. What all old ranks held alike goes to all ranks. What each old rank had of its own goes to the
        rank with the same number; rank 0 warns about the rest.

        Args:
            state: live tensors and arrays are overwritten in place, plain leaves are replaced, and objects get copies
                through ``load_state_dict``.
            step: restore this step instead of the newest.
            before: restore the newest step that is smaller than this one, for example after a loss spike.
            certified: restore the newest step that was certified (``certify_after``) or marked good.
            source: another directory that checkpoints were drained to. It is only read, and memory is not used.

        Returns:
            The step. None if nothing was ever committed, or if ``fresh`` passes over everything that was.

        Raises:
            Unrestorable: there are checkpoints, but none of them can be restored; ``reasons`` says why for each step.
                Nothing was changed or deleted: when a lost node is back, a relaunch can still restore.
            StructureMismatch: the state does not match the saved one; the error names both sides. Nothing was changed,
                or it was undone; otherwise the text says that the state is undefined, and :meth:`save` refuses it.
            StepNotFound: there is no such step, or it cannot be restored; the text says why.
            ValueError: ``step`` is given together with ``before`` or ``certified``.
            MemoryTooSmall: memory has no room to put the state together.
        """
        self._check_open()
        wanted = _wanted(step, before, certified)
        path = None if source is None else os.fspath(source)
        if self._light is not None and source is None:
            restored = self._light.restore(state, wanted)
        else:
            restored = self._restores.restore(state, wanted, path)
        if restored is None:
            self._name_others()
        return restored

    def _name_others(self) -> None:
        """Warn if memory has nothing of this training, but of others of the same Slurm job. Not collective."""
        if not self.enabled or self._config.fresh or self._trainer.ranks.rank:
            return
        if others := config.others_of(self._config.job, jobs_of(self._config.memory)):
            log.warning("nothing of this training (job %s) is in memory, but of others in this Slurm job: %s. If it is "
                        "one of them with other arguments, give it that name: job= or MLFLASH_JOB",
                        self._config.job, ", ".join(others))  # fmt: skip

    @restart_scope
    def load(
        self, step: int | None = None, *, before: int | None = None, certified: bool = False,
        source: str | os.PathLike[str] | None = None, copy: bool = True,
    ) -> tuple[int | None, Any]:  # fmt: skip
        """Return the newest step that memory or the directory has, as fresh CPU tensors and arrays.

        Collective over comm. Objects come back as what their ``state_dict`` returned.

        Args:
            step, before, certified, source: see :meth:`restore`.
            copy: False returns views of the slot at once, and does not verify them. What you write to a view stays in
                this process. While a view exists, saves have one slot less and wait for each other.

        Returns:
            ``(step, state)``, or ``(None, None)`` if :meth:`restore` would return None.

        Raises:
            Unrestorable: see :meth:`restore`.
            StepNotFound: there is no such step, or it cannot be loaded; the text says why.
            WorldSizeChanged: another number of ranks saved it. Only :meth:`restore` can convert it.
        """
        self._check_open()
        wanted = _wanted(step, before, certified)
        return self._restores.load(wanted, None if source is None else os.fspath(source), copy)

    def steps(self) -> list[int]:
        """List the steps that can be restored from memory or the directory, ascending.

        Collective over comm. It reads headers only; :meth:`restore` verifies the bytes.
        """
        self._check_open()
        whole = self._restores.steps()
        light = self._light.steps() if self._light is not None else []
        return sorted({*whole, *(step for step in light if whole and step > whole[0])})

    def mark_bad(self, step: int) -> None:
        """Mark a step as bad, for example because it led to a loss spike: restores pass over it from now on.

        Collective over comm. Every later run passes over it, too, unless you give its number: ``restore(state, step)``.
        The mark is written in memory and in the directory; nothing is deleted.

        Raises:
            StepNotFound: the step is neither in memory nor in the directory.
        """
        self._mark(step, is_good=False)

    def mark_good(self, step: int) -> None:
        """Mark a step as good, whatever its checks found: ``restore(certified=True)`` takes it.

        Collective over comm.

        Raises:
            StepNotFound: the step is neither in memory nor in the directory.
        """
        self._mark(step, is_good=True)

    def _mark(self, step: int, is_good: bool) -> None:
        self._check_open()
        self._saves.settle()
        if self.enabled and not self._courier.call("mark", _number(step), is_good):
            raise StepNotFound("this step is neither in memory nor in the directory", step=step)

    # Draining

    def drain(self) -> Drain:
        """Write the checkpoint that was committed or restored last to the directory, in the background.

        Collective over comm. Waits for the previous drain and for all saves so far. If ``drain_every`` is 0 there is
        no slot for drains, and one of the next saves waits for the drain.

        Returns:
            The drain. Its ``wait()`` returns when the checkpoint is in the directory.

        Raises:
            DrainFailed: there is no directory, or nothing to drain.
        """
        self._check_open()
        self._saves.settle()
        return self._drains.drain()

    def wait_drained(self, timeout_s: float | None = None) -> None:
        """Wait until no drain is running. What :meth:`drain` returned, and the log, say how it ended.

        Not collective.

        Args:
            timeout_s: seconds. None: wait as long as some rank makes progress.

        Raises:
            DeadlineExceeded: the drain is still running.
        """
        self._check_open()
        self._drains.wait(timeout_s)

    def scavenge(self) -> Drain | None:
        """Write the newest checkpoint that memory has to the directory, without training.

        Collective over comm, which may have another number of ranks than the job: one on each remaining node is enough.
        Lost slots are rebuilt from copies or parity. Memory keeps what it has.

        Returns:
            The drain. None if memory has nothing newer than the directory.
        """
        self._check_open()
        return self._drains.last if self._courier.call("scavenge") else None

    def reprotect(self) -> int | None:
        """Make the lost copies and parity of the newest checkpoint in memory again, without training.

        Collective over comm, which must have as many ranks as the job, on the nodes where the job will run.

        Returns:
            The step. None if memory has no checkpoint.

        Raises:
            WorldSizeChanged: comm has another number of ranks.
            MemoryTooSmall, SaveFailed: reprotecting failed; what was in memory is untouched.
        """
        self._check_open()
        step: int | None = self._courier.call("reprotect_newest")
        return step

    # Information

    @property
    def last_step(self) -> int | None:
        """The newest step that was saved or restored by this Checkpointer; None before the first. Not collective."""
        return self._saves.last_step

    @property
    def timeout_s(self) -> float:
        """Seconds that each job of the courier may take; for a drain, seconds without progress."""
        return self._config.timeout_s

    @property
    def survives(self) -> str:
        """Which losses the committed step survives, in words, computed from which rank protects which.

        Not collective.

        Example:
            "any process; any 1 of 8 nodes; 24 of 28 pairs of nodes; any 1 rack; not: racks A and B together"
        """
        survives: str = self._courier.ask("survives")
        return survives

    def report(self) -> dict[str, Any]:
        """Return counters, seconds per operation, placement and last drain of this rank; see `Session.report`.

        The entry ``courier`` says which process it is, where it runs, and how the ranks met; ``light`` is the report of
        light saves. Not collective.
        """
        report: dict[str, Any] = self._courier.ask("report") | {"courier": self._courier.is_a}
        if self.enabled:
            recorder = self._trainer.recorder
            report["counts"], report["seconds"] = recorder.merged(report["counts"], report["seconds"])
        if self._light is not None:
            report["light"] = self._light.lane.report()
        return report

    def _check_open(self) -> None:
        if self._closed and self.enabled:
            raise Closed(self._closed)

    # The end

    def __enter__(self) -> Checkpointer:
        return self

    @restart_scope
    def close(self) -> None:
        """Wait for the saves and drains so far, and free windows and communicators; the slots stay in memory.

        Collective over comm. You may call it twice. With ``drain_every`` it first drains the newest checkpoint.

        Raises:
            SaveFailed, DeadlineExceeded: as in :meth:`wait`; or some ranks did not come to the call. The Checkpointer
                is closed in any case.
        """
        if self._closed:
            return
        if self._light is not None:
            self._light.close()
        is_freed = False
        try:
            self._saves.settle()
            if not self._courier.is_stuck:
                self._drains.finish()
            is_freed = not self._courier.is_stuck and self._drains.idle
            if is_freed:
                self._courier.call("free")
            self._trainer.copy_threads.close()
        finally:  # after an interrupt, too: collective calls are left out then, because other ranks may not make them
            self._end(not is_freed or self._courier.is_stuck, "ended" if sys.exc_info()[0] is None else "failed")
        self._saves.raise_what_failed()

    def _end(self, abandon: bool, state: str) -> None:
        self._is_ended = True
        self._closed = "this Checkpointer was closed"
        with contextlib.ExitStack() as steps:  # they run in reverse order, and each one runs even if another raises
            steps.callback(process_end.discard, self)
            steps.callback(self._trainer.memory.close)
            steps.callback(self._trainer.slots.close)
            steps.callback(self._saves.end)
            steps.callback(self._courier.stop, abandon)
            steps.callback(self._drains.give_up)
            steps.callback(self._trainer.recorder.end, state)

    def _end_alone(self, state: str, why: str) -> None:
        step, config = self._saves.last_step, self._config
        if config.drain_every and self._trainer.ranks.rank == 0 and self._drains.lacks(step):
            log.warning("step %d is in memory only, and not in %s: %s, so close() did not drain it. A relaunch "
                        "restores it from memory, and `mlflash scavenge %s` writes it there",
                        step, config.directory, why, config.directory)  # fmt: skip
        self._end(abandon=True, state=state)

    def after_save(self, call: Callable[[Snapshot], None]) -> None:
        """Call a function at the end of each `save`, also of an adapter, in the thread that saves. Not collective."""
        self._saves.after_save = call

    def interrupt(self, why: str) -> None:
        """Make the next call raise Closed, for example because this run is over. Not collective; any thread."""
        self._closed = self._closed or why
        if self._light is not None:
            self._light.lane.interrupt(why)

    def abandon(self, timeout_s: float = 10.0) -> bool:
        """Give the Checkpointer up without any other rank. Not collective. What was committed stays.

        Returns:
            Whether nothing copies into its slots any more, so that another Checkpointer may use them.
        """
        if self._light is not None and not self._light.abandon(timeout_s):
            return False
        if not self._is_ended:
            self._saves.end()
            self._is_unused = self._trainer.slots.wait_until_written(time.monotonic() + timeout_s)
            self._end(abandon=True, state="failed")
            self._trainer.copy_threads.close()
        return self._is_unused

    def _leave(self) -> None:
        """Close it in a forked process: everything belongs to the parent, and continues there. Not collective."""
        self._closed = FORKED
        for leave in (self._courier.leave, self._trainer.recorder.leave, self._saves.end):
            leave()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:  # fmt: skip
        """Close it. If an exception is leaving the block, do so without any collective and without waiting."""
        if kind is None:
            self.close()
        elif joined:
            self.abandon()  # the process stays, and its next Checkpointer has the same slots
        elif not self._is_ended:
            if isinstance(error, MlflashError):
                self._trainer.recorder.uncaught("".join(traceback.format_exception(kind, error, trace)))
            self._end_alone("failed", "an exception ended the training")


def _signature() -> inspect.Signature:
    """What `help` and completion show of ``Checkpointer.__init__``: each setting in the place of ``**settings``."""
    written = inspect.signature(Checkpointer.__init__)
    parameters = [each for each in written.parameters.values() if each.kind is not each.VAR_KEYWORD]
    settings = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(Config)
        if field.name not in written.parameters
    ]
    return written.replace(parameters=[*parameters, *settings])


Checkpointer.__init__.__signature__ = _signature()  # type: ignore[attr-defined]


# What a Checkpointer works with in its trainer


def _connect(settings: Config, comm: Any, process_group: Any, replicated: Any, domains: Any
             ) -> tuple[TrainerState, Drains, Started]:  # fmt: skip
    """Start a rank's courier, connect the ranks, and make what saving and restoring work with.

    Collective, with the arguments and exceptions of `Checkpointer`.
    """
    shared = connection.get(settings, comm)
    rank, size = shared.couriers.rank, shared.couriers.size
    ranks = shared.ranks_of(comm)
    assert ranks is not None
    if comm is None:
        ranks = some_ranks(process_group, rank, size) or ranks
    courier = Client(shared, settings, ranks)
    whole = shared.group()  # `replicated` may be a communicator of the program's MPI
    group = None if whole is None else whole.Incl(ranks)
    start = _start(ranks.index(rank), len(ranks), group, process_group, replicated, domains)
    try:
        started = courier.introduce(start)
        memory = NodeDirectory(settings.memory, settings.job, make=False, top=started.top)
    except BaseException:
        courier.stop(abandon=True)
        raise
    trainer = _trainer(settings, courier, process_group, memory, start, started)
    drains = Drains(courier, trainer.ranks, settings)
    courier.attach(trainer, drains.moved, drains.lost)
    if started.goes_on:  # a rank that had started before this one has lost its courier, and does the same
        courier.call("protect_left")
    if not trainer.ranks.rank:
        log.info("courier: %s", courier.is_a)
        if (torch := loaded_versions().get("torch")) is not None and (warning := not_run_with(torch)) is not None:
            log.warning("%s", warning)
    return trainer, drains, started


def _start(rank: int, size: int, group: Any, process_group: Any, replicated: Any, domains: Any) -> Start:
    """How this rank starts, or why it cannot."""
    problem, replicas = None, None
    try:
        check_torch_rank(rank, size, process_group)
        replicas = replicas_of(replicated, rank, size, group, process_group)
    except MlflashError as error:
        problem = error
    if isinstance(domains, os.PathLike):
        domains = os.fspath(domains)  # messages are plain data
    return Start(problem, replicas, domains, os.urandom(8).hex())


def _trainer(settings: Config, courier: Client, process_group: Any, memory: NodeDirectory, start: Start,
             started: Started) -> TrainerState:  # fmt: skip
    """Make what saving and restoring work with."""
    ranks = Ranks(courier, started.rank, started.topology, settings.timeout_s, process_group)
    slots = OwnSlots(memory, started.slots, courier)
    slots.update(started.files)
    recorder = _recorder(settings, ranks, memory, start.name, started)
    threads = CopyThreads(started.copy_threads)
    provenance = provenance_of(loaded_versions(), settings.provenance)
    return TrainerState(settings, courier, ranks, memory, slots, threads, recorder, provenance, started.sharing)


def _recorder(settings: Config, ranks: Ranks, memory: NodeDirectory, start: str, started: Started) -> TrainerRecorder:
    local_rank = ranks.topology.ranks_on[ranks.node_index].index(ranks.rank)
    run = os.environ.get("MLFLASH_RUN", "")
    facts = RankFacts(ranks.rank, ranks.size, local_rank, ranks.node_name, run, start)
    of_node = None
    if settings.metrics and not local_rank:  # the first rank of each node exports those of all
        of_node = NodeMetrics(settings.job, lambda: read_heartbeats(settings.memory, settings.job))
    where, is_otlp = targets_of(settings.metrics)
    metrics = Metrics(where, of_node) if of_node is not None and where else None
    exporter = Exporter(settings.job, of_node) if is_otlp else None
    file = file_of_node(settings.log, ranks.node_index) if settings.log else None
    events = EventLog(file, exporter, run=started.run, rank=ranks.rank, node=ranks.node_name)
    return TrainerRecorder(ranks.rank, TrainerHeartbeat(memory, facts, settings.heartbeat), events, metrics)


# Steps


def _wanted(step: int | None, before: int | None, certified: bool) -> WantedStep:
    if step is not None and (before is not None or certified):
        raise ValueError("give either step=, which names a checkpoint, or before= and certified=, which choose one")
    return WantedStep(None if step is None else _number(step), None if before is None else _number(before), certified)


def _number(step: int) -> int:
    """The number of a step, whatever class it has."""
    number = operator.index(step)
    if not 0 <= number < 1 << 63:
        raise StepNotFound("no step has such a number", expected="0 to 2**63 - 1", found=number)
    return number
