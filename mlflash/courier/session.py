"""The courier's side of one Checkpointer: what its trainer can call."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import crash_points
from ..channel.records import FoundInMemory, SaveRequest, Search, Start, Started, Trainer
from ..channel.wanted_parts import WantedPart
from ..commit import commit
from ..commit.certification import Saved
from ..commit.start import make
from ..config import Config
from ..drain import checkpoint_directory
from ..drain.checkpoint_directory import Listed
from ..drain.drain_handle import Drain
from ..drain.drain_runs import DrainQueue
from ..drain.provenance import Signer, signer_of
from ..errors import ConfigError, CorruptSlot, MlflashError
from ..launch import courier_mpi
from ..memory.inventory import WantedStep, write_verdict
from ..memory.node_directory import file_number
from ..memory.own_slots import SlotFile
from ..memory.shared_memory_segment import Segment
from ..memory.slot import Attempt, Slot, Verdict
from ..mpi.job_thread import JobThread
from ..mpi.world import World
from ..placement.survival import describe, of
from ..protect.deduplication import Shareable
from ..protect.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..restore.choose import Sources, count_restore, reprotect_newest, restorable_steps, scavenge
from ..restore.fetch import exchange_fragments
from ..restore.open_in_memory import MemoryCheckpoint
from ..restore.repair import repair, reprotect_left, reprotect_or_remember
from ..restore.scrub import Scrubber
from ..version import __version__


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A checkpoint of this rank that was found and verified, for a restore that follows at once."""

    checkpoint: MemoryCheckpoint
    asked: WantedStep
    generation: int  # of the newest attempt at that time: a later save may have overwritten the checkpoint


class Session:
    """The courier's side of one Checkpointer. It lives where MPI may be called.

    Its trainer calls its methods by name (`channel`). Those of the first section are jobs: the courier does them one
    after the other, and every rank posts the same jobs in the same order, so they are collective over the world. They
    raise MlflashError on all ranks. Those of the last section are answered at once, on any thread, and are not
    collective.

    Args:
        drain_began: called with each drain that begins.
        trains_on: the cores of the trainer.

    Attributes:
        state: what saving, draining and restoring work with; it exists from `start` on.
    """

    ASK_BACK = frozenset({"commit", "commit_restored", "settle_shared"})
    """Jobs that ask their trainer something meanwhile. Its answers are their last argument."""

    def __init__(self, config: Config, world: World, jobs: JobThread, drain_began: Callable[[Drain], None],
                 trains_on: frozenset[int]):  # fmt: skip
        self._config, self._world, self._jobs, self._drain_began = config, world, jobs, drain_began
        self._trains_on = trains_on
        self._checked: _Checked | None = None
        self._found: MemoryCheckpoint | None = None  # the newest; stays mapped until the next one
        self._attempt: Attempt | None = None  # of what was found in memory; None: a directory was chosen

    def attach(self, trainer: Trainer) -> None:
        """Set the trainer that is told about changes from now on."""
        self.state.trainer = trainer

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
        if hasattr(self, "state"):
            self._scrubber.close()
            self.state.recorder.end()
            if not abandon:
                self.state.pool.close()
            self.state.memory.close()

    def _tell(self) -> None:
        if hasattr(self, "state"):
            self.state.pool.end_exchange()
            self.state.tell_trainer()

    # Jobs: start and end

    def start(self, facts: Start) -> Started:
        """Connect the ranks, lock the job, find what earlier runs left, and take their files over."""
        world = self._world
        signer, problem = Signer(), facts.problem
        try:
            signer = signer_of(self._config) if world.rank == 0 else signer
        except ConfigError as error:  # the other ranks must know, too
            problem = problem or error
        self.state = state = make(
            self._config, world, problem, facts.replicas, facts.domains, facts.name, self._trains_on
        )
        self._scrubber = scrubber = Scrubber(state, self._config.scrub_rate, lambda: self._drains.last)
        state.diverged_step = facts.ended_step
        if facts.goes_on:  # until the newest step is protected, the step before is needed, too
            state.pool.hold_older()
        self._drains = DrainQueue(self._config, state, self._jobs, self._drain_began, signer)
        self._jobs.when_idle = scrubber.go_on if self._config.scrub_rate else None
        self._sources = Sources(state, self._drains)
        pool, threads = state.pool, state.copy_threads.threads
        self._drains.advance_generation()
        agreed = world.agree(any_of={"goes_on": facts.goes_on}, max_of={"interrupted": facts.interrupted})
        return Started(world.rank, world.topology, state.memory.top, len(pool.own), threads,
                       state.left.unusable, pool.news(), state.sharing, state.run_id.hex()[:8],
                       agreed.interrupted, agreed.goes_on, self.run_facts())  # fmt: skip

    def protect_left(self) -> tuple[int | None, int]:
        """Make the redundancy whole of the newest step in memory, in whose save another courier may have died.

        Returns this step and its generation; None and 0: there is no step that counts as committed.
        """
        return reprotect_left(self.state)

    def free(self) -> None:
        """Free windows, communicators and threads as soon as all ranks ask for it. Afterwards a rank may leave."""
        crash_points.reach("close.asked")
        self._world.barrier()  # no rank leaves while others still wait for it
        self._jobs.when_idle = None
        self._scrubber.close()
        self._drains.free()
        self.state.free()
        crash_points.reach("close.freed")

    # Jobs: agreement

    def least_or_raise(self, values: Sequence[int], error: MlflashError | None) -> list[int]:
        """If any rank has an error, raise it on all ranks; otherwise take the minimum of each number over them."""
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
        received: bytes = self._world.broadcast(content, root)
        return received

    # Jobs: saving

    def commit(self, request: SaveRequest, trainer: Trainer) -> int:
        """Complete a save, and return the generation of its attempt."""
        state, scrubber = self.state, self._scrubber
        commit.bring_to_end(request, trainer, state, self._drains, lambda home: reprotect_or_remember(state, home),
                            lambda: repair(state, scrubber))  # fmt: skip
        return state.generation

    def commit_restored(self, request: SaveRequest, restores: int, trainer: Trainer) -> None:
        """Commit the state that a restore put together, like a save; then the old slots may go. If it fails, they stay.

        ``restores``: how many runs have restored it.
        """
        state = self.state
        state.examiner.forget()
        save = commit.Save(request, trainer, state, is_restored=True)
        commit.run(save, state)
        if save.slot is not None:
            save.slot.record_restores(save.attempt, restores)

    def reserve(self, nbytes: int, share_nbytes: int, is_first: bool) -> None:
        """Make slots, and those of their redundancy; see `CourierState.reserve`."""
        self.state.reserve(nbytes, share_nbytes, is_first)

    def find_replicas(self, held: Mapping[tuple[int, ...], int]) -> None:
        """Find the ranks that hold the same state; see `CourierState.find_replicas`."""
        self.state.find_replicas(held)

    def settle_shared(self, held: Mapping[tuple[int, ...], int], trainer: Shareable) -> None:
        """Agree on what is shared of a state that is not saved yet."""
        self.state.settle_shared(held, trainer)

    def make_room(self, lease: int, nbytes: int, gives_way: bool) -> None:
        """Make room in leased slots, for the state that a restore puts together.

        ``gives_way``: whether files that are left aside may be deleted for it.
        """
        state = self.state
        state.gives_way = state.gives_way or gives_way
        slot = state.pool.leased(lease)[0]
        state.ensure_room([(slot, nbytes)], waiting=[slot])

    # Jobs: restoring

    def choose(self, search: Search, reuse: bool) -> FoundInMemory | Listed | None:
        """Choose between memory and directory, and fetch a checkpoint in memory to where it can be read.

        ``reuse``: take the checkpoint just chosen by a search that is remembered, if it fits and is unchanged.
        """
        if reuse and (checked := self._take_checked(search.wanted)) is not None:
            return self._describe(checked)
        self._unmap()
        found = self._sources.choose(search)
        self._attempt = None
        if not isinstance(found, MemoryCheckpoint):
            return found
        self._found = found
        if search.remember and found.own is not None:
            self._checked = _Checked(found, search.wanted, self.state.generation)
        return self._describe(found)

    def _take_checked(self, wanted: WantedStep) -> MemoryCheckpoint | None:
        """Take what was just verified. None if something else is wanted, or if it may have changed. Collective."""
        checked, self._checked = self._checked, None
        if checked is None:  # the same on all ranks
            return None
        checkpoint, state = checked.checkpoint, self.state
        same = checked.asked == wanted or wanted == WantedStep(checkpoint.step)
        same = same and checked.generation == state.generation and self._number_of(checkpoint) is not None
        return checkpoint if state.world.all_of(same) else None

    def _number_of(self, checkpoint: MemoryCheckpoint) -> int | None:
        """The number of the own slot that holds a checkpoint; None: other ranks saved it, or the slot was replaced."""
        slot = None if checkpoint.own is None else checkpoint.own.slot
        return next((number for number, own in enumerate(self.state.pool.own) if own is slot), None)

    def _describe(self, found: MemoryCheckpoint) -> FoundInMemory:
        restored = self.state.restored
        self._attempt = found.attempt
        homes = {} if found.own else {rank: file_number(home.slot.name) for rank, home in found.homes.items()}
        return FoundInMemory(found.attempt, found.step, found.restores, self._number_of(found), homes, found.files,
                             restored.rolled_forward, restored.source)  # fmt: skip

    def _mapped(self) -> dict[int, Segment]:
        """The mapped segments, of this rank's slots and of what was found, by inode."""
        slots = [] if self._found is None else self._found.slots
        found = {slot.segment.inode: slot.segment for slot in slots if slot.segment is not None and slot.view.nbytes}
        return {**found, **self.state.pool.mapped()}

    def _unmap(self) -> None:
        """Unmap what was found before, except this rank's own slots."""
        found, self._found = self._found, None
        self.state.pool.unmap_others([] if found is None else found.slots)

    def exchange(self, attempt: Attempt, homes: Mapping[int, int], files: ShareFiles,
                 asked: Mapping[int, Sequence[WantedPart]]) -> bool:  # fmt: skip
        """Send parts of what is in memory that other ranks ask for, and get those that this rank asks for, by rank.

        ``homes``: by old rank, the numbers of the files that this rank reads for others. Returns whether all arrived
        intact.
        """
        state = self.state
        if not state.world.any_of(asked):
            return True
        opened: dict[int, RankCheckpoint] = {}
        try:
            state.world.on_all(lambda: self._open(attempt, homes, files, opened))
            has = {rank: (home.reader(), home.manifest.entries) for rank, home in opened.items()}
            good = exchange_fragments(state, has, asked)
        finally:
            state.pool.unmap_others(slot for home in opened.values() for slot in (home.slot, *home.shares))
        nbytes = sum(part.target.nbytes for parts in asked.values() for part in parts)
        state.recorder.counts["bytes asked of other nodes"] += nbytes
        return good

    def _open(self, attempt: Attempt, homes: Mapping[int, int], files: ShareFiles, opened: dict[int, RankCheckpoint]
              ) -> None:  # fmt: skip
        state, mapped = self.state, self._mapped()
        open_file: Callable[[int], Slot] = lambda number: state.pool.open(number, mapped)
        for rank, file in homes.items():
            slot = open_file(file)
            if slot.header is None or (slot.header.attempt, slot.header.rank) != (attempt, rank):
                raise CorruptSlot(f"{slot.name} no longer holds the checkpoint that is being read", rank=rank)
            opened[rank] = open_rank_checkpoint(open_file, state.world.node_index, slot, files)

    def hold_older(self, own: int) -> None:
        """Protect the step before from saves, whether the restored one, in own slot ``own``, can be loaded or not.

        Until the copies of the restored step are made, only the step before survives the loss of a node.
        """
        self.state.pool.hold_older()
        self.state.unprotected = self.state.pool.own[own]

    def reprotect_first(self, own: int) -> None:
        """Protect what was found, in own slot ``own``, before it is read or put together anew, if that needs it.

        If a step was rolled forward, no other slots may have it. And a rank whose slot came from another node may hold
        a slot that is another rank's: it is freed when that rank's is protected, and a new state needs one.
        """
        state = self.state
        if state.restored.rolled_forward or not state.world.all_of(state.pool.has_free):
            reprotect_or_remember(state, state.pool.own[own])

    def restored(self, own: int | None) -> None:
        """Note that a step was restored, from own slot ``own``; None: it was put together, or came from a directory."""
        state = self.state
        state.gives_way = True  # newer steps that could not be restored may now be deleted to make room
        state.examiner.forget()
        self._drains.restored(self._attempt)
        if own is not None:
            home = state.pool.own[own]
            count_restore(state, home)
            state.unprotected = None  # it is protected again now, and saves wait for it
            assert home.header is not None
            is_suspect = state.restored.verdict in (Verdict.SUSPECT, Verdict.BAD)
            state.certification.restored(Saved(home.header.attempt, home.header.step), is_suspect)

    def reprotect_restored(self, own: int) -> None:
        """Restore the redundancy of the restored step, which own slot ``own`` holds."""
        state, recorder, home = self.state, self.state.recorder, self.state.pool.own[own]
        start, step = time.perf_counter(), 0 if home.header is None else home.header.step
        before = recorder.counts["slots reprotected"]
        reprotect_or_remember(state, home)
        recorder.reprotected(step, time.perf_counter() - start, recorder.counts["slots reprotected"] > before)
        recorder.holds(state.pool.nbytes)

    def mark(self, step: int, is_good: bool) -> int:
        """Write a verdict on a step into all files that hold it; return in how many places it was found."""
        state, verdict = self.state, Verdict.GOOD if is_good else Verdict.BAD
        world = state.world
        marked: set[Attempt] = set()
        folders: list[str] = []

        def write() -> None:
            if world.local_rank == 0:
                marked.update(write_verdict(state.memory, step, verdict))

        world.on_all(write)
        attempts = frozenset(attempt for of_rank in world.gather([*marked]) for attempt in of_rank)
        listed, store = self._drains.listing().listed, self._drains.store

        def write_folders() -> None:
            if world.rank == 0 and store is not None:
                folders.extend(checkpoint_directory.mark(store, listed, step, verdict))

        world.on_all(write_folders)
        state.certification.mark(attempts, is_good)
        if is_good and state.certification.certified is not None:
            state.examiner.forget()  # from now on the present values are the normal ones
        return len(attempts) + int(world.broadcast(len(folders), 0))

    def steps(self, alike: bool) -> list[int]:
        """List the steps that can be restored, according to headers; ``alike``: only those of as many ranks as now."""
        state = self.state
        size, listed = state.world.size, self._drains.listing().listed
        drained = {folder.step for folder in listed if not alike or folder.card.world_size == size}
        return sorted(drained.union(restorable_steps(state, alike=alike)))

    # Jobs: draining, and what needs no training

    def begin_drain(self, if_due: bool) -> None:
        """Begin to drain the newest checkpoint; ``if_due``: only if draining is on and it is not drained yet."""
        self._drains.begin_newest(if_due)

    def scavenge(self) -> bool:
        """Begin to drain the newest checkpoint in memory, without training. Returns whether there is one."""
        return scavenge(self.state, self._drains) is not None

    def reprotect_newest(self) -> int | None:
        """Restore the redundancy of the newest checkpoint, without training. Returns its step, or None."""
        return reprotect_newest(self.state)

    # Answered at once

    def lease(self, number: int, leave: bool, lent: Sequence[int]) -> list[SlotFile]:
        """Lease own slots to the trainer; see `SlotPool.lease`."""
        return self.state.pool.lease(number, leave, lent)

    def release(self, number: int, given_up: Sequence[int]) -> None:
        """Take unused slots back; see `SlotPool.end_lease`."""
        self.state.pool.end_lease(number, given_up)

    def ask_drain(self) -> None:
        """Drain the checkpoint that is committed next."""
        self._drains.ask()

    def give_up_drain(self) -> None:
        """End a drain that is under way soon, and delete what it has written."""
        self._drains.give_up()

    def report(self) -> dict[str, Any]:
        """Counters, seconds per verb, and the placement of this rank.

        Returns:
            ``enabled`` (False if mlflash is off; then all other values are empty), ``rank``, ``node``, ``scheme``,
            ``group`` (ranks that protect each other), ``partners`` (ranks that hold copies), ``shared with`` (ranks
            that together store what they hold alike), ``transport``, ``mpi`` (the library of couriers; "" for one
            rank), ``job``, ``memory`` (its directory there), ``restored_from`` (the source of this rank's state at the
            last restore: the node whose memory had it, the folder of the directory, or ""), ``drain`` (step, path,
            seconds, bytes and error of the newest one, or None), ``send rate`` (largest number of bytes per second;
            None: no limit), ``slots`` (for each: what it holds, file, use, rank, step and bytes), ``counts`` and
            ``seconds``.
        """
        state, world, drain = self.state, self.state.world, self._drains.last
        pool, protection, replicas = state.pool, state.protection, state.replicas
        by_kind = {"own": pool.own, "share": pool.shares, "kept": [*pool.kept, *pool.kept_shares]}
        kinds = {id(slot): kind for kind, of_kind in by_kind.items() for slot in of_kind}
        slots = [
            {"what": kinds.get(id(slot), "of others"), "file": slot.name, "use": slot.use.value,
             "nbytes": slot.nbytes, "rank": None if slot.header is None else slot.header.rank,
             "step": None if slot.header is None else slot.header.step}
            for slot in pool.all()
            if slot.name or slot not in (*pool.shares, *pool.kept_shares)
        ]  # fmt: skip
        drained = None if drain is None else {
            "step": drain.step, "path": drain.path, "seconds": drain.seconds, "nbytes": drain.nbytes,
            "error": None if drain.error is None else str(drain.error),
        }  # fmt: skip
        diverged = {} if replicas is None else {"tensors diverged": replicas.diverged}
        return {
            "enabled": True, "rank": world.rank, "node": world.node_name, "scheme": protection.scheme,
            "group": list(protection.group), "partners": list(protection.partners),
            "shared with": [] if replicas is None or replicas.sharing is None else list(replicas.sharing.ranks),
            "transport": protection.transport, "mpi": "" if world.mpi is None else courier_mpi.describe(),
            "job": state.config.job, "memory": state.memory.path, "restored_from": state.restored.source,
            "drain": drained, "send rate": state.pace.rate or None, "slots": slots,
            "counts": dict(state.recorder.counts) | diverged, "seconds": dict(state.recorder.seconds),
        }  # fmt: skip

    def run_facts(self) -> dict[str, Any]:
        """Facts that do not change during this run, for its recorder."""
        world, config, protection = self.state.world, self.state.config, self.state.protection
        return {
            "ranks": world.size, "nodes": list(world.topology.node_names), "redundancy": protection.scheme,
            "transport": protection.transport, "partners": list(protection.partners), "job": config.job,
            "directory": config.directory, "drain_every": config.drain_every, "pid": os.getpid(),
            "version": __version__,
        }  # fmt: skip

    def survives(self) -> str:
        """What may fail without the loss of a committed step; see `Checkpointer.survives`."""
        state = self.state
        survival = of(state.world.topology, state.protection.placement, state.shares)
        return describe(survival, state.domains_by_kind)

    def tell_doing(self, what: str) -> None:
        """Note what the trainer does, for ranks that wait for this one."""
        self._world.tell_doing(what)
