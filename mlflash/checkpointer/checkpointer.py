"""The facade: one object that saves, restores and waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from .. import config
from ..courier.connect import connect
from ..draining.drain import Drain
from ..errors import Closed, StepNotFound
from ..memory.wanted_step import WantedStep
from ..protocol.client import one_unit
from ..protocol.messages import GoBeyond, HealNewest, Mark, Report, RunFacts, Scavenge, Survives
from ..restoring.restore import Restores
from ..saving.save_queue import SaveQueue
from ..saving.snapshot import Snapshot
from . import disabled, uncaught, unclosed
from .ending import Ending
from .for_adapters import Adapting

log = logging.getLogger("mlflash")


class Checkpointer(Ending):
    """Saves the state of a training job in the memory of its nodes, and restores it after a failure.

    Collective over ``comm``, or over ``process_group`` where there is no ``comm``; where couriers are processes, the
    first one over all ranks, unless ``init_process_group`` of `mlflash.adapters.distributed` was called. Use it as a
    context manager, or call :meth:`close`.

    Args:
        directory: directory on the parallel file system, or a URL that fsspec knows, to which checkpoints are drained
            and from which they are restored; gives the job its name where nothing else does.
        redundancy: how slots are protected on other nodes: "copy", or "copy:k": k copies of each; "xor:n": groups of
            n nodes, any 1 of which may be lost; "rs:n+k": groups of n + k nodes, any k of which may be lost (k is 1
            to 3); "none". Default "copy".
        memory: node-local memory file system. Default "/dev/shm".
        job: name that ties a relaunch to the memory of the run before. Default: ``MLFLASH_JOB``, then
            ``SLURM_JOB_ID`` with a digest of ``directory``, then a name made from ``directory``.
        comm: mpi4py communicator; None is COMM_WORLD under an MPI launcher or srun, else this process alone.
        strict: raise when a save fails, instead of warning and going on.
        timeout_s: deadline of every wait, seconds. Default 300.
        when_busy: when both slots are busy, "wait" for the older commit, or "skip" this save on all ranks.
        reserve: bytes of state per rank to allocate at once; see :meth:`prepare`.
        transport: "rma", "p2p" or "auto"; how copies go to other nodes.
        skip_stuck: restore an older step where the newest one was restored by so many runs already and none of
            them committed a newer one. Default 0: never, only warn.
        domains: which nodes are lost together: the path of a file with a host (or host list) and its domains,
            outermost first, in each line; or a mapping from host to domain or tuple of domains. The nodes of a
            redundancy group are spread over them. Default: ``MLFLASH_DOMAINS``, then what Slurm knows of them.
        replicated: the ranks that hold the same state as this one (an mpi4py communicator or group, a
            torch.distributed process group, a list of ranks, or True for all), or a mapping from patterns of entry
            names to them. What they hold alike is stored once per node and not sent, where they are on more nodes
            than may be lost; they compare it at every step, and where it differs the step fails with a warning that
            names tensors and ranks. With ``share=False`` it is compared only. Nothing is sent over the group given.
            Default: the replicas that DTensors have by their placements, in the state of the first `restore` or
            `prepare`.
        fresh: begin anew, whatever is there: True, or any word. Each word does so once: a relaunch with it goes on from
            what came of it. What memory had is deleted after the first commit, ``directory`` keeps it all.
        drain_every: every so many checkpoints are drained to ``directory``, and the newest one at the end; takes a
            third slot. Default 0: none.
        keep_last, keep_every: what stays in ``directory``: the newest so many, and multiples of it. Default 0, 0: all.
        drain_rate, drain_writers: bytes per second of all ranks together; ranks that write at a time. Default 0: all.
        format: "hdf5", or "dcp": what plain `torch.distributed.checkpoint.load` reads.
        provenance: what each drained checkpoint says of itself besides: a dict of JSON values, such as a seed.
        sign_key: file of an Ed25519 private key in PEM, which signs that; see docs/drain.md. Default: none.
        log: a file that gets a line of JSON for each event, see docs/watching.md; each other node has one beside it.
        process_group: the torch.distributed group that has the ranks of ``comm``, or without ``comm`` the ranks of the
            job that this is for; nothing is sent. Default: all.
        enabled: False, or ``MLFLASH_DISABLE=1`` whatever is given here: no method does anything, nothing is collective,
            no setting is checked, and MPI is not started.
        settings: further fields of :class:`mlflash.config.Config`.

    Attributes:
        enabled, adapting: whether it does anything; what adapters need besides.

    Raises:
        ConfigError: a setting is missing or makes no sense.
        JobInUse: another live job uses this name on one of the nodes.
        MpiUnavailable, WorldMismatch: MPI is not what the launcher or torch.distributed says.
        UnsafePath: the job's directory in memory is not private to this user.
        MemoryTooSmall, DeadlineExceeded: ``reserve`` does not fit; not all ranks have come to it.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, redundancy: str | None = None,
        memory: str | None = None, job: str | None = None, comm: Any = None, strict: bool | None = None,
        timeout_s: float | None = None, when_busy: str | None = None, reserve: int | None = None,
        transport: str | None = None, skip_stuck: int | None = None, fresh: bool | str | None = None,
        drain_every: int | None = None, drain_rate: float | None = None, drain_writers: int | None = None,
        keep_last: int | None = None, keep_every: int | None = None, format: str | None = None,
        provenance: Mapping[str, Any] | None = None, sign_key: str | os.PathLike[str] | None = None,
        log: str | os.PathLike[str] | None = None, domains: Any = None, replicated: Any = None,
        process_group: Any = None, enabled: bool = True, **settings: Any,
    ):  # fmt: skip
        self._config = config.from_environment(
            os.environ, directory, redundancy=redundancy, memory=memory, job=job, strict=strict, timeout_s=timeout_s,
            when_busy=when_busy, reserve=reserve, transport=transport, skip_stuck=skip_stuck, fresh=fresh,
            drain_every=drain_every, drain_rate=drain_rate, drain_writers=drain_writers, keep_last=keep_last,
            keep_every=keep_every, format=format, log=None if log is None else os.fspath(log), enabled=enabled,
            provenance=provenance, sign_key=None if sign_key is None else os.fspath(sign_key), **settings,
        )  # fmt: skip
        self.enabled = self._config.enabled
        self._closed = "" if self.enabled else "off"  # why; there is nothing to close then
        self._is_ended = not self.enabled
        if self.enabled:
            self._start(comm, process_group, replicated, domains)
            return
        self._courier, self._drains, self._saves, self._restores, self.adapting = disabled.stand_ins(comm)

    def _start(self, comm: Any, process_group: Any, replicated: Any, domains: Any) -> None:
        """Make what does the work. Collective over comm."""
        uncaught.show_briefly()
        self._trainer, self._drains, started = connect(self._config, comm, process_group, replicated, domains)
        trainer, self._courier = self._trainer, self._trainer.courier
        uncaught.is_of_rank(trainer.ranks.rank)
        if trainer.ranks.rank == 0:
            for name in config.unknown_variables(os.environ):
                log.warning("the environment sets %s, which is no setting of mlflash", name)
        self._saves = SaveQueue(trainer)
        self._restores = Restores(trainer, self._saves, self._drains)
        self.adapting = Adapting(trainer.ranks, self._saves, self._restores, self._drains, self._config,
                                 self._check_open)  # fmt: skip
        unclosed.add(self, lambda me, state: me._end(abandon=True, state=state), Checkpointer._leave)
        try:
            self._courier.call(GoBeyond())
            facts = self._courier.ask(RunFacts()) | {"courier": self._courier.is_a}
            trainer.recorder.started(facts, lambda: self.survives)
            if self._config.reserve and not started.unusable:  # room may be what was committed needs, come back
                self._saves.reserve(self._config.reserve)
        except BaseException:  # the caller gets no object to close
            self._end(abandon=True, state="failed")
            raise

    # Saving

    @one_unit
    def save(self, step: int, state: Any, *, until: Any = None) -> Snapshot:
        """Copy the state into this rank's slot and let it be protected and committed in the background.

        Collective over comm, in that all ranks save the same steps in the same order; but no rank waits for
        another here, unless both slots are busy or the state has grown. After it returns, ``state`` may be
        changed at once.

        Args:
            step: training step, 0 or more, larger than the one before.
            state: nested dicts, lists and tuples of tensors, arrays, plain values, and objects with
                ``state_dict`` and ``load_state_dict``.
            until: torch optimizers: what they hold is copied while training goes on, until one of them steps; the
                save fails where something else has written to it.

        Returns:
            The snapshot; its ``wait()`` ends when it is committed.

        Raises:
            StepOrderError: the step does not grow. The other ranks' save of it fails too.
            StateError: a leaf cannot be saved; its path is named. Or a restore has failed and left the state undefined.
            SaveFailed: only with ``strict``: this save, or an earlier one in the background, failed.
        """
        self._check_open()
        return self._saves.save(step, state, until)

    def wait(self) -> None:
        """Wait until every save so far is committed or has failed.

        Not collective.

        Raises:
            SaveFailed, DeadlineExceeded: only with ``strict``.
        """
        self._check_open()
        self._saves.wait()

    @one_unit
    def prepare(self, state: Any) -> None:
        """Allocate the slots for a state like this one, before the first save; their pages are faulted in behind.

        Collective over comm. Leaves that an adapter made will do as well.

        Raises:
            MemoryTooSmall: they do not fit into the node's memory; nothing was allocated.
            StateError: a leaf cannot be saved.
        """
        self._check_open()
        self._saves.prepare(state)

    # Restoring

    @one_unit
    def restore(
        self, state: Any, step: int | None = None, *, before: int | None = None, certified: bool = False,
        source: str | os.PathLike[str] | None = None,
    ) -> int | None:  # fmt: skip
        """Fill the state, in place, with the newest step that memory or the directory can give.

        Collective over comm. Every byte is verified on all ranks before anything is changed. Afterwards the
        redundancy is made whole again in the background. Either way the slots are made as :meth:`prepare` does.

        Saved by other ranks, or in other shards, each tensor is put together from the old shards; what all old ranks
        had alike goes to all, and what each had its own of to the rank of its number. Rank 0 warns of the rest.

        Args:
            state: live tensors and arrays are copied into, plain leaves replaced, objects get copies through
                ``load_state_dict``.
            step: restore this step instead of the newest.
            before: restore the newest step that is smaller than this, as after a loss spike.
            certified: restore the newest step that was certified (``certify_after``), or marked good.
            source: another directory that checkpoints were drained to: it is read only, and memory is not looked at.

        Returns:
            The step, or None where nothing was ever committed, or all that was is passed over (``fresh``).

        Raises:
            Unrestorable: checkpoints are there, and none can be restored; ``reasons`` says of each step why. Nothing
                was changed or deleted: with a lost node back, a relaunch can still restore.
            StructureMismatch: the state does not look like the saved one; both sides are named. Nothing was changed,
                or what was is put back, or the text says that the state is undefined: :meth:`save` refuses it then.
            StepNotFound: there is no such step, or it cannot be restored; the text says why.
            ValueError: ``step`` is given together with ``before`` or ``certified``.
            MemoryTooSmall: there is no room to put it together.
        """
        self._check_open()
        wanted = _wanted(step, before, certified)
        return self._restores.restore(state, wanted, None if source is None else os.fspath(source))

    @one_unit
    def load(
        self, step: int | None = None, *, before: int | None = None, certified: bool = False,
        source: str | os.PathLike[str] | None = None, copy: bool = True,
    ) -> tuple[int | None, Any]:  # fmt: skip
        """Give the newest step that memory or the directory can give as fresh CPU tensors and arrays.

        Collective over comm. Objects come back as what their ``state_dict`` returned.

        Args:
            step, before, certified, source: see :meth:`restore`.
            copy: False gives views of what is in memory, at once and unverified. What is written to them stays in this
                process; as long as any is there, saves have one slot less, and wait for each other.

        Returns:
            ``(step, state)``, or ``(None, None)`` where :meth:`restore` gives None.

        Raises:
            Unrestorable: see :meth:`restore`.
            StepNotFound: there is no such step, or it cannot be loaded; the text says why.
            WorldSizeChanged: it was saved by another number of ranks: only :meth:`restore` knows what is wanted.
        """
        self._check_open()
        wanted = _wanted(step, before, certified)
        return self._restores.load(wanted, None if source is None else os.fspath(source), copy)

    def steps(self) -> list[int]:
        """List the steps that can be restored from memory or the directory, ascending.

        Collective over comm. Looks at headers only; the bytes are verified by :meth:`restore`.
        """
        self._check_open()
        return self._restores.steps()

    def mark_bad(self, step: int) -> None:
        """Say that a step is not to be restored any more, as it has led to a loss spike, say.

        Collective over comm. It is passed over from now on, by every later run too, unless its number is given:
        ``restore(state, step)``. What is in memory and in the directory is marked; nothing is deleted.

        Raises:
            StepNotFound: it is in neither.
        """
        self._mark(step, is_good=False)

    def mark_good(self, step: int) -> None:
        """Say that a step is good, whatever its checks said: ``restore(certified=True)`` takes it.

        Collective over comm.

        Raises:
            StepNotFound: it is neither in memory nor in the directory.
        """
        self._mark(step, is_good=True)

    def _mark(self, step: int, is_good: bool) -> None:
        self._check_open()
        self._saves.settle()
        if self.enabled and not self._courier.call(Mark(step, is_good)):
            raise StepNotFound("this step is neither in memory nor in the directory", step=step)

    # Draining

    def drain(self) -> Drain:
        """Write the checkpoint that was committed or restored last to the directory, in the background.

        Collective over comm. Waits for the drain before it and for the saves so far. Where ``drain_every`` is 0 there
        are two slots only: the next save but one then waits for the drain.

        Returns:
            The drain; its ``wait()`` ends when the checkpoint is in the directory.

        Raises:
            DrainFailed: there is no directory, or nothing to drain.
        """
        self._check_open()
        self._saves.settle()
        return self._drains.drain()

    def wait_drained(self, timeout_s: float | None = None) -> None:
        """Wait until no drain is on its way; how it ended is in what :meth:`drain` gave, and in the log.

        Not collective.

        Args:
            timeout_s: seconds; None: for as long as some rank gets on.

        Raises:
            DeadlineExceeded: it goes on still.
        """
        self._check_open()
        self._drains.wait(timeout_s)

    def scavenge(self) -> Drain | None:
        """Write the newest checkpoint that memory can give to the directory, with no training.

        Collective over comm, which may be of another number of ranks than the job: one on each node that is left will
        do. What is lost is rebuilt from copies or parity. What is in memory stays there.

        Returns:
            The drain; None where memory has nothing that is newer than what is in the directory.
        """
        self._check_open()
        return self._drains.last if self._courier.call(Scavenge()) else None

    def heal(self) -> int | None:
        """Make the redundancy of the newest checkpoint in memory whole again, with no training.

        Collective over comm, which must have as many ranks as the job, on the nodes where they will be.

        Returns:
            Its step; None where memory has nothing.

        Raises:
            WorldSizeChanged: this is another number of ranks.
            MemoryTooSmall, SaveFailed: it could not be made whole; what there was is untouched.
        """
        self._check_open()
        step: int | None = self._courier.call(HealNewest())
        return step

    # Looking

    @property
    def last_step(self) -> int | None:
        """The newest step that was saved or restored by this Checkpointer; None before the first. Not collective."""
        return self._saves.last_step

    @property
    def timeout_s(self) -> float:
        """Deadline of every wait, seconds."""
        return self._config.timeout_s

    @property
    def survives(self) -> str:
        """What may die without a committed step being lost, in words: computed from who protects whom.

        Not collective.

        Example:
            "any process; any 1 of 8 nodes; 24 of 28 pairs of nodes; any 1 rack; not: racks A and B together"
        """
        survives: str = self._courier.ask(Survives())
        return survives

    def report(self) -> dict[str, Any]:
        """Give counters, seconds per verb, how this rank is placed, and the last drain, see `rank_report.report_of`.

        Besides, ``courier`` says whether that is a thread or a process, and why. Not collective.
        """
        report: dict[str, Any] = self._courier.ask(Report()) | {"courier": self._courier.is_a}
        if self.enabled:
            mine = self._trainer.recorder
            report["counts"], report["seconds"] = mine.together(report["counts"], report["seconds"])
        return report

    def __enter__(self) -> Checkpointer:
        return self

    def _check_open(self) -> None:
        if self._closed and self.enabled:
            raise Closed(self._closed)


def _wanted(step: int | None, before: int | None, certified: bool) -> WantedStep:
    if step is not None and (before is not None or certified):
        raise ValueError("give either step=, which names a checkpoint, or before= and certified=, which choose one")
    return WantedStep(step, before, certified)
