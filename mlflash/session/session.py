"""The courier's side of one Checkpointer: what its trainer can call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import commit, crash_points
from ..config import Config
from ..courier.records import SaveRequest, Start, Started, Trainer
from ..courier.start import make
from ..courier.state import CourierState
from ..drain.drain import Drain
from ..drain.provenance import Signer, signer_of
from ..drain.queue import DrainQueue
from ..errors import ConfigError, MlflashError
from ..launch import mpi_library
from ..memory.own_slots import SlotFile
from ..mpi.job_thread import JobThread
from ..mpi.world import World
from ..placement.survival import describe, of
from ..protect.deduplication import Shareable
from ..restore.choose import Sources
from ..restore.fetch import heal_newest, scavenge
from ..restore.reprotect import heal_or_remember, mend, protect_left
from ..restore.scrub import Scrubber
from ..version import __version__
from .restores import RestoreSession


class Session(RestoreSession):
    """The courier's side of one Checkpointer. It lives where MPI may be called.

    Its trainer calls its methods by name (`channel`). Those of the first section are jobs: the courier does them one
    after the other, and every rank posts the same jobs in the same order, so they are collective over the world. They
    raise MlflashError on all ranks. `restores` has those for restoring. Those of the last section are answered at once,
    on any thread, and are not collective.

    Args:
        told_drain: called with each drain that begins.
        trains_on: the cores of the trainer.

    Attributes:
        context: what saving, draining and restoring work with; it exists from `start` on.
    """

    ASK_BACK = frozenset({"commit", "commit_restored", "settle_shared"})
    """Jobs that ask their trainer something meanwhile. Its answers are their last argument."""

    def __init__(self, config: Config, world: World, jobs: JobThread, told_drain: Callable[[Drain], None],
                 trains_on: frozenset[int]):  # fmt: skip
        super().__init__()
        self._config, self._world, self._jobs, self._told_drain = config, world, jobs, told_drain
        self._trains_on = trains_on

    def attach(self, trainer: Trainer) -> None:
        """Set the trainer that is told about changes from now on."""
        self.context.trainer = trainer

    def do(self, method: str, args: Sequence[Any]) -> Any:
        """Do a job, and tell the trainer what has changed."""
        try:
            result = getattr(self, method)(*args)
        except MlflashError:  # all ranks have agreed on it, so no operation is pending
            self._tell()
            raise
        self._tell()
        return result

    def end(self, abandon: bool) -> None:
        """Release memory, after the last job; ``abandon``: the courier may still be inside MPI and use the slots."""
        if hasattr(self, "context"):
            self._scrubber.close()
            self.context.recorder.end()
            if not abandon:
                self.context.pool.close()
            self.context.memory.close()

    def _tell(self) -> None:
        if hasattr(self, "context"):
            self.context.pool.end_exchange()
            self.context.tell_trainer()

    # Jobs: start and end

    def start(self, facts: Start) -> Started:
        """Connect the ranks, lock the job, find what earlier runs left, and take their files over."""
        world = self._world
        signer, problem = Signer(), facts.problem
        try:
            signer = signer_of(self._config) if world.rank == 0 else signer
        except ConfigError as error:  # the other ranks must know, too
            problem = problem or error
        self.context = context = make(
            self._config, world, problem, facts.replicas, facts.domains, facts.name, self._trains_on
        )
        self._scrubber = scrubber = Scrubber(context, self._config.scrub_rate, lambda: self._drains.last)
        context.left_at = facts.left_at
        if facts.goes_on:  # until the newest step is protected, the step before is needed, too
            context.pool.hold_older()
        self._drains = DrainQueue(self._config, context, self._jobs, self._told_drain, signer)
        self._jobs.when_idle = scrubber.go_on if self._config.scrub_rate else None
        self._sources = Sources(context, self._drains)
        pool, threads = context.pool, context.copy_threads.threads
        self._drains.advance_generation()
        told = world.agree(any_of={"goes_on": facts.goes_on}, max_of={"interrupted": facts.interrupted})
        return Started(world.rank, world.topology, context.memory.top, len(pool.own), threads,
                       context.left.unusable, pool.news(), context.sharing, context.run_id.hex()[:8],
                       told.interrupted, told.goes_on, self.run_facts())  # fmt: skip

    def protect_left(self) -> tuple[int | None, int]:
        """Make the redundancy whole of the newest step in memory, in whose save another courier may have died.

        Returns this step and its generation; None and 0: there is no step that counts as committed.
        """
        return protect_left(self.context)

    def free(self) -> None:
        """Free windows, communicators and threads as soon as all ranks ask for it. Afterwards a rank may leave."""
        crash_points.reach("close.asked")
        self._world.barrier()  # no rank leaves while others still wait for it
        self._jobs.when_idle = None
        self._scrubber.close()
        self._drains.free()
        self.context.free()
        crash_points.reach("close.freed")

    # Jobs: agreement

    def least_of(self, values: Sequence[int]) -> list[int]:
        """Take the minimum of each number over all ranks."""
        return self._world.least_of(values)

    def least_or_raise(self, values: Sequence[int], error: MlflashError | None) -> list[int]:
        """Do both of `least_of` and `raise_together`."""
        return self._world.least_or_raise(values, error)

    def do_unless(self, error: MlflashError | None, method: str, args: Sequence[Any]) -> Any:
        """If any rank has an error, raise it on all ranks; otherwise do another job."""
        self._world.raise_together(error)
        return getattr(self, method)(*args)

    def gather(self, content: bytes) -> list[bytes]:
        """Give every rank the bytes of every rank."""
        return self._world.gather(content)

    def broadcast(self, content: bytes, root: int) -> bytes:
        """Give every rank the bytes of one rank."""
        told: bytes = self._world.broadcast(content, root)
        return told

    def raise_together(self, error: MlflashError | None) -> None:
        """If any rank has an error, raise it on all ranks."""
        self._world.raise_together(error)

    # Jobs: saving

    def commit(self, request: SaveRequest, trainer: Trainer) -> int:
        """Complete a save, and return the generation of its attempt."""
        context, scrubber = self.context, self._scrubber
        commit.bring_to_end(request, trainer, context, self._drains, lambda home: heal_or_remember(context, home),
                            lambda: mend(context, scrubber))  # fmt: skip
        return context.generation

    def commit_restored(self, request: SaveRequest, restores: int, trainer: Trainer) -> None:
        """Commit the state that a restore put together, like a save; then the old slots may go. If it fails, they stay.

        ``restores``: how many runs have restored it.
        """
        context = self.context
        context.examiner.forget()
        save = commit.Save(request, trainer, context, is_restored=True)
        commit.run(save, context)
        if save.slot is not None:
            save.slot.record_restores(save.attempt, restores)

    def reserve(self, nbytes: int, share_nbytes: int, is_first: bool) -> None:
        """Make slots, and those of their redundancy; see `CourierState.reserve`."""
        self.context.reserve(nbytes, share_nbytes, is_first)

    def find_replicas(self, held: Mapping[tuple[int, ...], int]) -> None:
        """Find the ranks that hold the same state; see `CourierState.find_replicas`."""
        self.context.find_replicas(held)

    def settle_shared(self, held: Mapping[tuple[int, ...], int], state: Shareable) -> None:
        """Agree on what is shared of a state that is not saved yet."""
        self.context.settle_shared(held, state)

    def make_room(self, lease: int, nbytes: int, gives_way: bool) -> None:
        """Make room in leased slots, for the state that a restore puts together.

        ``gives_way``: whether files that are left aside may be deleted for it.
        """
        context = self.context
        context.gives_way = context.gives_way or gives_way
        slot = context.pool.leased(lease)[0]
        context.ensure_room([(slot, nbytes)], waiting=[slot])

    # Jobs: draining, and what needs no training

    def begin_drain(self, if_due: bool) -> None:
        """Begin to drain the newest checkpoint; ``if_due``: only if draining is on and it is not drained yet."""
        self._drains.begin_newest(if_due)

    def scavenge(self) -> bool:
        """Begin to drain the newest checkpoint in memory, without training. Returns whether there is one."""
        return scavenge(self.context, self._drains) is not None

    def heal_newest(self) -> int | None:
        """Restore the redundancy of the newest checkpoint, without training. Returns its step, or None."""
        return heal_newest(self.context)

    # Answered at once

    def lease(self, number: int, leave: bool, lent: Sequence[int]) -> list[SlotFile]:
        """Lease own slots to the trainer; see `SlotPool.lease`."""
        return self.context.pool.lease(number, leave, lent)

    def release(self, number: int, given_up: Sequence[int]) -> None:
        """Take unused slots back; see `SlotPool.end_lease`."""
        self.context.pool.end_lease(number, given_up)

    def ask_drain(self) -> None:
        """Drain the checkpoint that is committed next."""
        self._drains.ask()

    def give_up_drain(self) -> None:
        """End a drain that is under way soon, and delete what it has written."""
        self._drains.give_up()

    def report(self) -> dict[str, Any]:
        return report_of(self.context, self._drains.last)

    def run_facts(self) -> dict[str, Any]:
        """Facts that do not change during this run."""
        return run_facts(self.context)

    def survives(self) -> str:
        """What may fail without the loss of a committed step."""
        return survives(self.context)

    def tell_doing(self, what: str) -> None:
        """Note what the trainer does, for ranks that wait for this one."""
        self._world.tell_doing(what)


# What a rank can report about itself


def survives(context: CourierState) -> str:
    """What may fail without the loss of a committed step; see `Checkpointer.survives`."""
    survival = of(context.world.topology, context.protection.placement, context.shares)
    return describe(survival, context.domains_by_kind)


def run_facts(context: CourierState) -> dict[str, Any]:
    """Facts that do not change during this run, for its recorder."""
    world, config, protection = context.world, context.config, context.protection
    return {
        "ranks": world.size, "nodes": list(world.topology.node_names), "redundancy": protection.scheme,
        "transport": protection.transport, "partners": list(protection.partners), "job": config.job,
        "directory": config.directory, "drain_every": config.drain_every, "pid": os.getpid(),
        "version": __version__,
    }  # fmt: skip


def report_of(context: CourierState, drain: Drain | None) -> dict[str, Any]:
    """Counters, seconds per verb, and the placement of this rank.

    Returns:
        ``enabled`` (False if mlflash is off; then all other values are empty), ``rank``, ``node``, ``scheme``,
        ``group`` (ranks that protect each other), ``partners`` (ranks that hold copies), ``shared with`` (ranks that
        together store what they hold alike), ``transport``, ``mpi`` (the library of couriers; "" for one rank),
        ``job``, ``memory`` (its directory there), ``restored_from`` (the source of this rank's state at the last
        restore: the node whose memory had it, the folder of the directory, or ""), ``drain`` (step, path, seconds,
        bytes and error of the newest one, or None), ``send rate`` (largest number of bytes per second; None: no limit),
        ``slots`` (for each: what it holds, file, use, rank, step and bytes), ``counts`` and ``seconds``.
    """
    world, replicas = context.world, context.replicas
    holds = {
        id(slot): what for what, pair in (("own", context.pool.own), ("share", context.pool.shares)) for slot in pair
    }
    slots = [
        {"what": holds.get(id(s), "of others"), "file": s.name, "use": s.use.value, "nbytes": s.view.nbytes,
         "rank": None if s.header is None else s.header.rank, "step": None if s.header is None else s.header.step}
        for s in context.pool.all()
        if s.segment is not None or s not in context.pool.shares
    ]  # fmt: skip
    drained = None if drain is None else {
        "step": drain.step, "path": drain.path, "seconds": drain.seconds, "nbytes": drain.nbytes,
        "error": None if drain.error is None else str(drain.error),
    }  # fmt: skip
    return {
        "enabled": True,
        "rank": world.rank,
        "node": world.node_name,
        "scheme": context.protection.scheme,
        "group": list(context.protection.group),
        "partners": list(context.protection.partners),
        "shared with": [] if replicas is None or replicas.sharing is None else list(replicas.sharing.ranks),
        "transport": context.protection.transport,
        "mpi": "" if world.mpi is None else mpi_library.describe(),
        "job": context.config.job,
        "memory": context.memory.path,
        "restored_from": context.restored.source,
        "drain": drained,
        "send rate": context.pace.rate or None,
        "slots": slots,
        "counts": dict(context.recorder.counts) | ({} if replicas is None else {"tensors diverged": replicas.diverged}),
        "seconds": dict(context.recorder.seconds),
    }
