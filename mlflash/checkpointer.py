"""The facade: one object that saves, restores and waits."""

from __future__ import annotations

import atexit
import collections
import logging
import os
import time
import weakref
from types import TracebackType
from typing import Any

import numpy as np

from . import commit, config, restore
from .comm import World, check_torch_rank, find_comm
from .courier import Courier, Job
from .errors import (
    Closed,
    DeadlineExceeded,
    MlflashError,
    SaveFailed,
    StateError,
    StepOrderError,
    StructureMismatch,
)
from .parts import Parts, make
from .slot import Slot
from .snapshot import Snapshot
from .stage import Stage
from .state import Entry, compare, fill, flatten, materialize
from .topology import survives

log = logging.getLogger("mlflash")

_LISTED = 8  # differences shown in an error


class Checkpointer:
    """Saves the state of a training job in the memory of its nodes, and restores it after a failure.

    Collective over ``comm``. Use it as a context manager, or call :meth:`close`.

    Args:
        directory: directory on the parallel file system; gives the job its name where nothing else does.
        redundancy: "copy": each rank's slot is also on another node; "none": it is on its own node only.
        memory: node-local memory file system. Default "/dev/shm".
        job: name that ties a relaunch to the memory of the run before. Default: ``MLFLASH_JOB``, then
            ``SLURM_JOB_ID`` with a digest of ``directory``, then a name made from ``directory``.
        comm: mpi4py communicator; None is COMM_WORLD under an MPI launcher or srun, else this process alone.
        strict: raise when a save fails, instead of warning and going on.
        timeout_s: deadline of every wait, seconds. Default 300.
        when_busy: when both slots are busy, "wait" for the older commit, or "skip" this save on all ranks.
        reserve: bytes of state per rank to allocate at once; see :meth:`prepare`.
        transport: "rma", "p2p" or "auto"; how copies go to other nodes.
        settings: further fields of :class:`mlflash.config.Config`.

    Raises:
        ConfigError: a setting is missing or makes no sense.
        JobInUse: another live job uses this name on one of the nodes.
        MpiUnavailable, WorldMismatch: MPI is not what the launcher or torch.distributed says.
        UnsafePath: the job's directory in memory is not private to this user.
        MemoryTooSmall: ``reserve`` does not fit.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        redundancy: str | None = None,
        memory: str | None = None,
        job: str | None = None,
        comm: Any = None,
        strict: bool | None = None,
        timeout_s: float | None = None,
        when_busy: str | None = None,
        reserve: int | None = None,
        transport: str | None = None,
        **settings: Any,
    ):
        self._config = config.from_environment(
            os.environ, directory, redundancy=redundancy, memory=memory, job=job, strict=strict, timeout_s=timeout_s,
            when_busy=when_busy, reserve=reserve, transport=transport, **settings,
        )  # fmt: skip
        if comm is None:
            comm = find_comm(os.environ)
        self._world = World(comm, self._config.ranks_per_node, self._config.timeout_s)
        if not self._world.threads:
            log.warning("MPI was started without MPI_THREAD_MULTIPLE: save() will wait for the commit")
        self._courier = Courier(self._world, threaded=self._world.threads)
        self._closed = False
        self._last_step: int | None = None
        self._pending: list[Snapshot] = []
        self._stage = Stage(self._config.block_nbytes)
        self._seconds: collections.Counter[str] = collections.Counter()
        self._warned_late = False
        try:
            self._parts: Parts = self._courier.call(lambda: make(self._config, self._world))
        except BaseException:
            self._courier.stop(abandon=True)
            raise
        self._counts = self._parts.counts
        _live.add(self)
        if self._config.reserve:
            self._reserve(self._config.reserve)

    # Saving

    def save(self, step: int, state: Any) -> Snapshot:
        """Copy the state into this rank's slot and let it be protected and committed in the background.

        Collective over comm, in that all ranks save the same steps in the same order; but no rank waits for
        another here, unless both slots are busy or the state has grown. After it returns, ``state`` may be
        changed at once.

        Args:
            step: training step, 0 or more, larger than the one before.
            state: nested dicts, lists and tuples of tensors, arrays, plain values, and objects with
                ``state_dict`` and ``load_state_dict``.

        Returns:
            The snapshot; its ``wait()`` ends when it is committed.

        Raises:
            StepOrderError: the step does not grow. The other ranks' save of it fails too.
            StateError: a leaf cannot be saved; its path is named.
            SaveFailed: only with ``strict``: this save, or an earlier one in the background, failed.
        """
        self._check_open()
        whole = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
        snapshot = Snapshot(int(step) if whole else -1)
        save = commit.Save(snapshot, self._parts.next_attempt())
        mistake: MlflashError | None = None
        try:
            self._check_step(step if whole else None, step)
            self._fill(save, state)
        except (StateError, StepOrderError) as error:
            mistake = save.problem = error
        except MlflashError as error:
            save.problem = error
        late, refused = lambda error: self._note_late(snapshot, error), snapshot.end
        self._courier.post(Job(lambda: self._bring_to_end(save), late, refused))
        if save.stage is not None:
            save.staged.wait(self._config.timeout_s)
            if not save.staged.is_set():  # the caller must be able to go on: nothing may be copied from now on
                save.stage = _too_late
        snapshot.reported = mistake is not None
        self._pending.append(snapshot)
        snapshot.stalled()
        self._counts["saves"] += 1
        self._counts["bytes staged"] += snapshot.nbytes
        self._seconds["stall"] += snapshot.stall_s
        if mistake is not None:
            raise mistake
        if save.problem is not None and save.slot is None:
            log.warning("step %d is not saved: %s", step, save.problem)
        self._look_at_pending()
        return snapshot

    def _check_step(self, step: int | None, given: object) -> None:
        least = 0 if self._last_step is None else self._last_step + 1
        if step is None or step < least:
            raise StepOrderError("steps must grow from save to save", rank=self._world.rank, node=self._world.node_name,
                                 expected=f"a whole number, {least} or more", found=repr(given))  # fmt: skip
        self._last_step = int(step)

    def _fill(self, save: commit.Save, state: Any) -> None:
        check_torch_rank(self._world)
        flat = flatten(state)
        save.plan = self._stage.plan(flat)
        save.snapshot.nbytes = save.plan.layout.extents.nbytes
        if self._courier.late or self._courier.broken is not None:
            raise SaveFailed("an earlier save is still waiting for other ranks", rank=self._world.rank,
                             node=self._world.node_name, step=save.snapshot.step)  # fmt: skip
        slot = self._take_slot(save)
        if slot is None:
            return
        save.slot, planned = slot, save.plan
        if slot.view.nbytes >= planned.layout.extents.nbytes:
            self._stage.copy(flat, planned, slot)
        else:
            save.stage = lambda: self._stage.copy(flat, planned, slot)

    def _take_slot(self, save: commit.Save) -> Slot | None:
        if self._config.when_busy == "skip":
            slot = self._parts.shelf.take_own(0)
            save.skip = slot is None
            return slot
        end = time.monotonic() + self._config.timeout_s
        while (slot := self._parts.shelf.take_own(0.05)) is None:
            if self._courier.late or self._courier.broken is not None or time.monotonic() > end:
                raise SaveFailed("both slots are still busy with earlier saves", rank=self._world.rank,
                                 node=self._world.node_name, step=save.snapshot.step)  # fmt: skip
        return slot

    def _bring_to_end(self, save: commit.Save) -> None:
        start = time.perf_counter()
        try:
            commit.run(save, self._parts)
            self._counts["skipped" if save.snapshot.skipped else "committed"] += 1
            self._warned_late = False
        except MlflashError as error:
            self._counts["failed"] += 1
            if self._world.rank == 0 or error.rank == self._world.rank:
                log.warning("step %d was not saved: %s", save.snapshot.step, error)
            raise
        except BaseException as error:
            if not save.snapshot.done:
                save.snapshot.end(SaveFailed(f"the courier failed: {error!r}", step=save.snapshot.step))
            save.staged.set()
            raise
        finally:
            self._seconds["protect and commit"] += time.perf_counter() - start

    def _note_late(self, snapshot: Snapshot, error: DeadlineExceeded) -> None:
        self._counts["late"] += 1
        snapshot.late(error)
        if not self._warned_late:
            self._warned_late = True
            log.warning("step %d is late, and steps are not saved until it has caught up: %s", snapshot.step, error)

    def wait(self) -> None:
        """Wait until every save so far is committed or has failed.

        Not collective.

        Raises:
            SaveFailed, DeadlineExceeded: only with ``strict``.
        """
        self._check_open()
        for snapshot in self._pending:
            try:
                snapshot.wait()
            except MlflashError:
                pass  # a warning already, or raised below
        self._look_at_pending()

    def prepare(self, state: Any) -> None:
        """Allocate the slots for a state like this one, before the first save; their pages are faulted in behind.

        Collective over comm.

        Raises:
            MemoryTooSmall: they do not fit into the node's memory; nothing was allocated.
            StateError: a leaf cannot be saved.
        """
        self._check_open()
        error: MlflashError | None = None
        nbytes = 0
        try:
            nbytes = self._stage.plan(flatten(state)).layout.extents.nbytes
        except MlflashError as problem:
            error = problem
        self._courier.call(lambda: self._world.raise_together(error))
        self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> None:
        parts = self._parts

        def work() -> None:
            sizes = self._world.gather(nbytes)
            demand = [(slot, nbytes) for slot in parts.shelf.own]
            demand += [(slot, sizes[owner]) for owner, pair in parts.shelf.inbox.items() for slot in pair]
            commit.grow_slots(parts, demand)

        self.wait()
        self._courier.call(work)

    # Restoring

    def restore(self, state: Any, step: int | None = None) -> int | None:
        """Fill the state, in place, with the newest step that memory can give.

        Collective over comm. Every byte is verified on all ranks before anything is changed. Afterwards the
        redundancy is made whole again in the background.

        Args:
            state: live tensors and arrays are copied into, plain leaves replaced, objects get copies through
                ``load_state_dict``.
            step: restore this step instead of the newest.

        Returns:
            The step, or None where there is nothing to restore.

        Raises:
            StructureMismatch: the state does not look like the saved one; both sides are named.
            StepNotFound: there is no such step.
            WorldSizeChanged: it was saved by another number of ranks.
        """
        home = self._find(step)
        if home is None:
            return None
        assert home.header is not None
        start = time.perf_counter()
        manifest = home.manifest()
        error: MlflashError | None = None
        differences = compare(state, manifest.tree, manifest.entries)
        if differences:
            shown = "\n    ".join(differences[:_LISTED])
            error = StructureMismatch(
                f"the state given differs from the checkpoint in {len(differences)} places:\n    {shown}",
                rank=self._world.rank,
                node=self._world.node_name,
                step=home.header.step,
            )
        self._courier.call(lambda: self._world.raise_together(error))
        try:
            fill(state, manifest.tree, manifest.entries, manifest.plain, self._reader(home))
        except Exception as problem:  # load_state_dict of an object may raise anything: all ranks must hear of it
            error = StructureMismatch(f"loading failed: {problem!r}", rank=self._world.rank,
                                      node=self._world.node_name, step=home.header.step)  # fmt: skip
            error.__cause__ = problem
        self._courier.call(lambda: self._world.raise_together(error))
        self._seconds["load"] += time.perf_counter() - start
        return self._restored(home)

    def load(self, step: int | None = None) -> tuple[int | None, Any]:
        """Give the newest step that memory can give as fresh CPU tensors and arrays.

        Collective over comm. Objects come back as what their ``state_dict`` returned.

        Returns:
            ``(step, state)``, or ``(None, None)`` where there is nothing.

        Raises:
            StepNotFound, WorldSizeChanged: as :meth:`restore`.
        """
        home = self._find(step)
        if home is None:
            return None, None
        manifest = home.manifest()
        state = materialize(manifest.tree, manifest.entries, manifest.plain, self._reader(home))
        return self._restored(home), state

    def _find(self, step: int | None) -> Slot | None:
        self._check_open()
        start = time.perf_counter()
        self.wait()
        self._stage.forget()
        home: Slot | None = self._courier.call(lambda: restore.bring_home(self._parts, step))
        self._seconds["find and fetch"] += time.perf_counter() - start
        return home

    def _reader(self, home: Slot) -> Any:
        assert home.header is not None
        payload = home.payload(home.header.extents)

        def read(entry: Entry) -> np.ndarray:
            return payload[entry.start : entry.start + entry.nbytes]

        return read

    def _restored(self, home: Slot) -> int:
        assert home.header is not None
        step = self._last_step = home.header.step
        self._counts["restores"] += 1
        if self._world.rank == 0:
            log.info("restored step %d from memory", step)
        self._courier.post(Job(lambda: self._heal(home)))
        return step

    def _heal(self, home: Slot) -> None:
        start = time.perf_counter()
        try:
            restore.heal(self._parts, home)
        except MlflashError as error:
            log.warning("the restored step has no full redundancy: %s", error)
        self._seconds["heal"] += time.perf_counter() - start

    def steps(self) -> list[int]:
        """List the steps that can be restored from memory, ascending.

        Collective over comm. Looks at headers only; the bytes are verified by :meth:`restore`.
        """
        self._check_open()
        self.wait()
        steps: list[int] = self._courier.call(lambda: restore.restorable_steps(self._parts))
        return steps

    # Looking

    @property
    def survives(self) -> str:
        """What may die without a committed step being lost, in words. Not collective."""
        return survives(self._world.topology, self._config.redundancy.split(":")[0])

    def report(self) -> dict[str, Any]:
        """Give counters, seconds per verb, and how this rank is placed. Not collective.

        Returns:
            ``rank``, ``node``, ``partner`` (-1: none), ``transport``, ``job``, ``directory`` (in memory),
            ``slots`` (file, use, step and bytes of each), ``counts`` and ``seconds``.
        """
        parts = self._parts
        slots = [
            {"file": s.name, "use": s.use.value, "nbytes": s.view.nbytes,
             "rank": None if s.header is None else s.header.rank, "step": None if s.header is None else s.header.step}
            for s in parts.shelf.all()
        ]  # fmt: skip
        return {
            "rank": self._world.rank,
            "node": self._world.node_name,
            "partner": parts.copies.partner,
            "transport": parts.copies.transport,
            "job": self._config.job,
            "memory": parts.memory.path,
            "slots": slots,
            "counts": dict(self._counts),
            "seconds": dict(self._seconds),
        }

    # Ending

    def close(self) -> None:
        """Wait for the saves so far, free windows and communicators; the slots stay in memory.

        Collective over comm. May be called twice.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            stuck = self._courier.late or self._courier.broken is not None
            if not stuck:
                self._courier.call(self._parts.free)
            self._end(abandon=stuck)

    def _end(self, abandon: bool) -> None:
        self._closed = True
        self._courier.stop(abandon)
        self._stage.forget()
        if not abandon:  # an abandoned courier may still be inside MPI, with the slots as its buffers
            self._parts.shelf.close()
        self._parts.memory.close()
        _live.discard(self)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close; where an exception is on its way, without any collective and without waiting."""
        if kind is None:
            self.close()
        elif not self._closed:
            self._end(abandon=True)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this Checkpointer was closed")

    def _look_at_pending(self) -> None:
        """Forget the snapshots that have ended; with ``strict``, raise what failed, once."""
        wrong = [s for s in self._pending if s.error is not None and not s.reported]
        self._pending = [s for s in self._pending if not s.done]
        for snapshot in wrong:
            snapshot.reported = True
        if wrong and self._config.strict and wrong[0].error is not None:
            raise wrong[0].error


def _too_late() -> None:
    raise SaveFailed("there was no room for the state in time")


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _stop_couriers() -> None:
    """Stop what was never closed: no thread may be inside MPI when mpi4py finalises it."""
    for checkpointer in list(_live):
        checkpointer._end(abandon=True)
