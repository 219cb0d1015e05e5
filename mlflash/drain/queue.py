"""The drains of this run: when one is due, that they follow each other, and what is in the directory.

One drain runs at a time; a checkpoint that is due meanwhile is passed over in favor of the next one. The ranks agree
with the commit on which checkpoint is drained (see `commit`), so that no rank waits for another.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from ..commit.courier_state import CourierState
from ..config import Config
from ..errors import DrainFailed
from ..memory.inventory import scan
from ..memory.slot import Attempt, Kind, Slot, Use, Verdict
from ..mpi.background_collectives import BackgroundCollectives, in_thread
from ..mpi.job_thread import JobThread
from ..mpi.nonblocking import Operation
from ..protect.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..storage.store import Store, is_url, open_store
from . import checkpoint_directory
from .checkpoint_directory import Listing
from .drain import Drain
from .provenance import Signer
from .rank_input import DrainInput
from .write import DrainRun

log = logging.getLogger("mlflash")

_FOLDERS = 8  # drained attempts whose folders are remembered
_LOOK_S = 0.001  # how often rank 0 checks whether the directory was read


class DrainQueue:
    """Drains checkpoints to the directory."""

    def __init__(self, config: Config, context: CourierState, courier: JobThread, on_begin: Callable[[Drain], None],
                 signer: Signer):  # fmt: skip
        self._config, self._context, self._courier, self._on_begin = config, context, courier, on_begin
        self.store: Store | None = None if config.directory is None else open_store(config.directory)
        self.last: Drain | None = None
        self._collectives: BackgroundCollectives | None = None
        self._problem = ""  # why the directory could not be read when it was looked at last
        self._since = 0  # checkpoints committed since the newest drained one
        self._asked = False
        self._certified: Attempt | None = None  # certified, but not yet noted in the directory
        self._folders: dict[Attempt, str] = {}  # drained by this run; the newest is last
        self._cleans = True  # whether what interrupted drains of earlier runs left is still to be deleted
        self._drained: Attempt | None = None  # the newest attempt whose drain has begun
        self._restored: Attempt | None = None  # restored from memory: an earlier run may not have drained it
        self._signer = signer

    @property
    def idle(self) -> bool:
        return self.last is None or self.last.done

    @property
    def is_on(self) -> bool:
        return self._config.drain_every > 0

    @property
    def asked(self) -> bool:
        world, memory = self._context.world, self._context.memory
        self._asked = self._asked or (self.store is not None and world.local_rank == 0 and memory.take_request())
        return self._asked

    def ask(self) -> None:
        self._asked = True

    def committed(self, slot: Slot | None, share: Slot | None, asked: bool, idle: bool) -> None:
        """Count a checkpoint that was just committed, and begin to drain it if it is due; for the courier."""
        self._since += 1
        due = asked or (self.is_on and self._since >= self._config.drain_every)
        if self.store is None or slot is None or not due:
            return
        if idle:
            self._begin(slot, share)
        else:
            self._context.recorder.counts["drains put off"] += 1

    def restored(self, attempt: Attempt | None) -> None:
        """Note what was restored from memory; None: it came from a directory."""
        self._restored = attempt

    def certified(self, attempt: Attempt) -> None:
        """Note in the directory that an attempt is certified, once it is there."""
        self._certified = attempt
        self._note_certified()

    def _note_certified(self) -> None:
        attempt, store, rank = self._certified, self.store, self._context.world.rank
        if attempt is None or store is None or attempt not in self._folders:
            return
        self._certified, inside, owner = None, store.at(self._folders[attempt]), self._config.owner

        def note() -> None:
            try:
                checkpoint_directory.write_verdict(inside, attempt, owner, Verdict.CERTIFIED)
            except Exception as problem:  # fsspec may raise anything
                log.warning("could not note in %s that the step is certified: %s", inside.path, problem)

        if rank == 0:  # on a separate thread, because the file system may hang: nobody waits for it
            threading.Thread(target=note, name="mlflash-verdict", daemon=True).start()

    def begin_newest(self, if_due: bool = False) -> None:
        """Begin to drain the newest checkpoint; no drain may be running. Collective over the world.

        ``if_due``: only if draining is on and the checkpoint was not drained yet, by this run or an earlier one. Raises
        DrainFailed on all ranks if there is nothing to drain.
        """
        if if_due and not (self.is_on and (self._since or self._lacks_restored())):
            return
        pool = self._context.pool
        held = [slot for slot in pool.own if slot.header is not None and slot.use is Use.HOLDS]
        slot = max(held, key=lambda slot: slot.generation, default=None)
        missing = DrainFailed("nothing was committed or restored yet") if slot is None else None
        self._context.world.raise_together(missing)
        assert slot is not None and slot.header is not None
        if slot.header.attempt == self._drained and self.last is not None and self.last.error is None:
            return
        attempt = slot.header.attempt
        share = next((s for s in pool.shares if s.header is not None and s.header.attempt == attempt), None)
        self._begin(slot, share)

    def _lacks_restored(self) -> bool:
        """Whether this run restored a checkpoint from memory that is not in the directory. Collective."""
        attempt = self._restored
        if not self._context.world.all_of(attempt is not None):
            return False
        return attempt not in [listed.card.attempt for listed in self.listing().listed]

    def give_up(self) -> None:
        if self.last is not None:
            self.last.given_up.set()

    def advance_generation(self) -> None:
        """Continue the numbers of a directory that a fresh start passes over. Collective over the world."""
        if self._context.world.rank == 0 and self.store is not None:
            # On a separate thread, because the file system may hang. Nobody waits for the result.
            threading.Thread(target=self._say_what_will_not_come, args=(self.store,), name="mlflash-look",
                             daemon=True).start()  # fmt: skip
        context, listing = self._context, self._list(self.store)
        others = [checkpoint for checkpoint in listing.listed if self._config.mark not in (0, checkpoint.card.mark)]
        if listing.problem:  # its checkpoints have small numbers, or numbers from an earlier time
            newest = int(context.world.broadcast(time.time_ns() // 1_000_000, 0))
            if self._config.mark and not context.take_stock().rows.size:
                context.floor = newest
        else:
            newest = max((checkpoint.card.attempt.generation for checkpoint in listing.listed), default=0)
        context.floor = max(context.floor, *(checkpoint.card.attempt.generation + 1 for checkpoint in others), 0)
        context.generation = max(context.generation, newest)
        if others and context.world.rank == 0:
            log.warning("fresh start %r: steps %s in %s are passed over, and stay there", self._config.fresh,
                        sorted({checkpoint.step for checkpoint in others}), self.store and self.store.path)  # fmt: skip

    def _say_what_will_not_come(self, store: Store) -> None:
        """Log at the start, and not only when a drain fails, what will not be drained."""
        step = self._context.left.step
        if step is not None and not is_url(store.path) and not os.path.exists(store.path):
            log.log(logging.WARNING if self.is_on else logging.INFO,
                    "%s does not exist, but memory still has step %d of job %s, and a restore takes it. To begin "
                    "anew, use fresh=True or MLFLASH_FRESH=1, or run `mlflash clean %s`",
                    store.path, step, self._config.job, self._config.job)  # fmt: skip
        if not self.is_on:
            log.info("drain_every is 0, so nothing is written to %s by itself: drain() writes the newest checkpoint",
                     store.path)  # fmt: skip
        if why := store.why_not_writable():
            log.warning("no checkpoint can be drained to %s: %s", store.path, why)

    def listing(self, store: Store | None = None) -> Listing:
        """List what is in the directory, except what a fresh start passes over; or everything that is in another one.

        Collective over the world: rank 0 looks. A directory that cannot be read gives a warning and counts as empty.
        """
        floor = self._context.floor
        if store not in (None, self.store) or not floor:
            return self._list(store or self.store)
        listing = self._list(self.store)
        own = tuple(checkpoint for checkpoint in listing.listed if checkpoint.card.attempt.generation >= floor)
        return Listing(own, {}, listing.problem)  # if a checkpoint cannot be read, its job is unknown

    def _list(self, store: Store | None) -> Listing:
        if store is None:
            return Listing()
        world = self._context.world
        listing: Listing | None = None
        problem = ""
        if world.rank == 0:
            looking = in_thread(lambda: checkpoint_directory.scan(store), "mlflash-list")
            end = time.monotonic() + self._config.timeout_s / 2
            try:
                while listing is None and time.monotonic() < end:
                    try:
                        next(looking)
                        time.sleep(_LOOK_S)
                    except StopIteration as through:
                        listing = through.value
                if listing is None:
                    problem = f"{store.path} does not answer"
            except Exception as error:  # fsspec may raise anything
                problem = f"{store.path} cannot be read: {error}"
            if problem and problem != self._problem:
                log.warning("nothing is restored from the directory: %s", problem)
            self._problem = problem
        agreed: Listing = world.broadcast(listing or Listing(problem=problem), 0)
        return agreed

    def free(self) -> None:
        if self._collectives is not None:
            self._collectives.free()

    def begin(self, drain_input: DrainInput, held: Sequence[Slot] = ()) -> Drain:
        """Begin to drain what this process hands in.

        Collective over the world; for a job of the courier, and only if no drain is running.
        """
        context, store = self._context, self.store
        if store is None:
            raise DrainFailed("this Checkpointer has no directory to drain to")
        if self._collectives is None:
            self._collectives = BackgroundCollectives(context.world)
        for slot in held:
            slot.drains = True
        self._since, self._asked = 0, False
        self._drained = drain_input.attempt
        current = self.last = Drain(drain_input.step, self._refuse_if_broken, self._config.timeout_s)
        self._on_begin(current)
        context.recorder.counts["drains"] += 1
        run = DrainRun(current, drain_input, context.world, self._collectives, store, self._config, self._signer,
                       self._cleans)  # fmt: skip

        def moves() -> Operation:
            error = yield from run.moves()
            self._cleans = run.cleans
            for home in drain_input.homes.values():
                context.pool.unmap_others([home.slot, *home.shares])
            context.pool.drained(held)
            context.tell_trainer()
            if error is None:
                newest = [*self._folders.items()][1 - _FOLDERS :]
                self._folders = {**dict(newest), drain_input.attempt: os.path.basename(current.path)}
                self._note_certified()
            current.end(error)
            context.recorder.drained(current.step, current.seconds or 0.0, current.nbytes, current.path, error)

        self._courier.begin_background(moves())
        return current

    def _refuse_if_broken(self) -> None:
        if self._courier.broken is not None:
            raise DrainFailed("mlflash stopped after an earlier error", found=self._courier.broken)

    def _begin(self, slot: Slot, share: Slot | None) -> None:
        context, header = self._context, slot.header
        assert header is not None

        def open_home_of_mine() -> dict[int, RankCheckpoint]:
            files: ShareFiles = {}
            if slot.manifest().shared is not None:
                node = context.world.node_index
                rows = scan(context.memory, node).of(header.attempt).rows
                shares = rows[rows["kind"] == Kind.SHARE]
                files = {(node, (int(row["shared_by"]), int(row["number"]))): int(row["file"]) for row in shares}
            return {context.world.rank: open_rank_checkpoint(context.pool.open, context.world.node_index, slot, files)}

        verdict = slot.verdict
        drain_input = DrainInput(
            header.attempt, header.step, context.world.size, open_home_of_mine, header.mark,
            checks={"values": verdict.name.lower()} if verdict else {}, verdict=lambda: slot.verdict,
        )  # fmt: skip
        self.begin(drain_input, [held for held in (slot, share) if held is not None])
