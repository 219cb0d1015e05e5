"""The courier's side of one Checkpointer: a handler for each message of its trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .. import crash_points
from ..config import Config
from ..draining.drain import Drain
from ..draining.drain_queue import DrainQueue
from ..draining.provenance import Signer, signer_of
from ..errors import ConfigError, MlflashError
from ..mpi.job_thread import JobThread
from ..mpi.world import World
from ..placement.survival import describe, of
from ..protocol import messages as asked
from ..protocol.messages import Message, Started
from ..protocol.save_request import Trainer
from ..restoring.from_memory import heal_newest, scavenge
from ..restoring.heal import heal_or_remember, mend, protect_left
from ..restoring.scrubber import Scrubber
from ..saving import commit
from ..saving.commit import Commits
from ..startup.context import Context, TrainerEnd
from ..startup.start import make
from ..version import __version__
from ..wireup import mpi_library
from .restores import FoundCheckpoints


class Session:
    """The courier's side of one Checkpointer. It lives where MPI may be called.

    Args:
        told_drain: called with each drain that begins.
        trains_on: the cores of the trainer.

    Attributes:
        context: what saving, draining and restoring work with; it exists from `Start` on.
    """

    context: Context

    def __init__(self, config: Config, world: World, jobs: JobThread, told_drain: Callable[[Drain], None],
                 trains_on: frozenset[int]):  # fmt: skip
        self._config, self._world, self._jobs, self._told_drain = config, world, jobs, told_drain
        self._trains_on = trains_on
        self._handlers: dict[type[Message], Callable[..., Any]] = {
            asked.Start: self._start,
            asked.Agree: lambda agree: world.agree(agree.values),
            asked.Gather: lambda gather: world.gather(gather.content),
            asked.Broadcast: lambda broadcast: world.broadcast(broadcast.content, broadcast.root),
            asked.RaiseTogether: lambda together: world.raise_together(together.error),
        }

    def attach(self, trainer: TrainerEnd) -> None:
        """Set the trainer that is told about changes from now on."""
        self.context.trainer = self.context.pool.trainer = trainer

    def handle(self, message: Message, answers: Any = None) -> Any:
        """Do what a message asks for. Collective if the message is; on the thread that may call MPI.

        Raises MlflashError on all ranks. ``answers``: the trainer, for questions in the meantime.
        """
        handler = self._handlers[type(message)]
        try:
            result = handler(message) if answers is None else handler(message, answers)
        except MlflashError:  # all ranks have agreed on it, so no operation is pending
            self._tell()
            raise
        self._tell()
        return result

    def answer(self, message: Message) -> Any:
        """Answer a message that is not a job. Not collective; any thread."""
        match message:
            case asked.AskDrain():
                self._drains.ask()
            case asked.GiveUpDrain():
                self._drains.give_up()
            case asked.Report():
                return report_of(self.context, self._drains.last)
            case asked.RunFacts():
                return run_facts(self.context)
            case asked.Survives():
                return survives(self.context)
            case _:
                raise TypeError(f"this message is a job and cannot be answered at once: {message}")
        return None

    def tell_doing(self, what: str) -> None:
        """Note what the trainer does, for ranks that wait for this one. Not collective; any thread."""
        self._world.tell_doing(what)

    def close(self, abandon: bool) -> None:
        """Release memory, after the last job; ``abandon``: the courier may still be inside MPI and use the slots."""
        if hasattr(self, "context"):
            self._scrubber.close()
            self.context.recorder.end()
            if not abandon:
                self.context.pool.close()
            self.context.memory.close()

    def _tell(self) -> None:
        if hasattr(self, "context"):
            self.context.tell_trainer()

    def _free(self) -> None:
        crash_points.reach("close.asked")
        self._world.agree([])  # a barrier: no rank leaves while others still wait for it
        self._jobs.when_idle = None
        self._scrubber.close()
        self._drains.free()
        self.context.free()
        crash_points.reach("close.freed")

    def _start(self, start: asked.Start) -> Started:
        world = self._world
        signer, problem = Signer(), start.problem
        try:
            signer = signer_of(self._config) if world.rank == 0 else signer
        except ConfigError as error:  # the other ranks must know, too
            problem = problem or error
        self.context = context = make(
            self._config, world, problem, start.replicas, start.domains, start.start, self._trains_on
        )
        self._scrubber = scrubber = Scrubber(context, self._config.scrub_rate, lambda: self._drains.last)
        context.left_at = start.left_at
        if start.goes_on:  # until the newest step is protected, the step before is needed, too
            context.pool.hold_older()
        self._drains = DrainQueue(self._config, context, self._jobs, self._told_drain, signer)
        self._jobs.when_idle = scrubber.go_on if self._config.scrub_rate else None
        self._commits = Commits(context, self._drains, lambda home: heal_or_remember(context, home),
                                lambda: mend(context, scrubber))  # fmt: skip
        self._handlers |= {
            asked.GoBeyond: lambda message: self._drains.go_beyond(),
            asked.ProtectLeft: lambda message: protect_left(context),
            asked.Free: lambda message: self._free(),
            asked.Commit: self._commit,
            asked.CommitRestored: self._commit_restored,
            asked.Reserve: lambda message: context.reserve(message.nbytes, message.share_nbytes, message.is_first),
            asked.FindReplicas: lambda message: context.find_replicas(message.held),
            asked.SettleShared: lambda message, state: context.settle_shared(message.held, state),
            asked.MakeRoom: self._make_room,
            asked.BeginDrain: lambda message: self._drains.begin_newest(message.if_due),
            asked.Scavenge: lambda message: scavenge(context, self._drains) is not None,
            asked.HealNewest: lambda message: heal_newest(context),
            **FoundCheckpoints(context, self._drains).table,
        }
        pool, threads = context.pool, context.copy_threads.threads
        interrupted = -world.agree([-start.interrupted])[0]
        return Started(world.rank, world.topology, context.memory.top, len(pool.own), threads,
                       context.unusable, pool.news(), context.sharing, context.run_id.hex()[:8],
                       interrupted)  # fmt: skip

    def _commit(self, message: asked.Commit, trainer: Trainer) -> int:
        self._commits.bring_to_end(message.request, trainer)
        return self.context.generation

    def _make_room(self, message: asked.MakeRoom) -> None:
        """Make room for the state that a restore puts together."""
        context = self.context
        context.gives_way = context.gives_way or message.gives_way
        slot, share = context.pool.receive(message.slots, message)
        try:
            context.ensure_room([(slot, message.nbytes)], waiting=[slot])
        finally:
            context.pool.leave_to_trainer([slot, share])

    def _commit_restored(self, message: asked.CommitRestored, trainer: Trainer) -> None:
        """Commit the state that a restore put together; then the old slots may go. If that fails, they stay."""
        context = self.context
        context.examiner.forget()
        save = commit.Save(message.request, trainer, context, is_restored=True)
        commit.run(save, context)
        if save.slot is not None:
            save.slot.record_restores(save.attempt, message.restores)


# What a rank can report about itself


def survives(context: Context) -> str:
    """What may fail without the loss of a committed step; see `Checkpointer.survives`."""
    survival = of(context.world.topology, context.protection.placement, context.shares)
    return describe(survival, context.domains_by_kind)


def run_facts(context: Context) -> dict[str, Any]:
    """Facts that do not change during this run, for its recorder."""
    world, config, protection = context.world, context.config, context.protection
    return {
        "ranks": world.size, "nodes": list(world.topology.node_names), "redundancy": protection.scheme,
        "transport": protection.transport, "partners": list(protection.partners), "job": config.job,
        "directory": config.directory, "drain_every": config.drain_every, "pid": os.getpid(),
        "version": __version__,
    }  # fmt: skip


def report_of(context: Context, drain: Drain | None) -> dict[str, Any]:
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
        "restored_from": context.restored_from,
        "drain": drained,
        "send rate": context.pace.rate or None,
        "slots": slots,
        "counts": dict(context.recorder.counts) | ({} if replicas is None else {"tensors diverged": replicas.diverged}),
        "seconds": dict(context.recorder.seconds),
    }
