"""The drains of a courier: when one is due, and the way of each from the slots to a folder of the directory.

One drain runs at a time; a checkpoint that is due meanwhile is passed over in favor of the next one. The ranks agree
with the commit on which checkpoint is drained (see `commit`), so that no rank waits for another.

    survey    each rank makes digests of what others may hold alike; rank 0 names the folder
    divide    what all ranks hold alike, and what sets of them share, is divided                  2 gathers, 1 allreduce
    write     at most so many ranks at a time: checksums, the slot verified, the file written      1 allreduce
    tell      what each rank holds becomes one table (see `describe_ranks`)                       3 gathers, 1 allreduce
    commit    rank 0 writes the provenance, and the file that commits; it deletes older ones       1 gather, 1 broadcast

What takes long is done on a thread of its own, which never calls MPI; the courier does the rest, a little at a time.
Whatever goes wrong on any rank, all give the drain up: what was written for it is deleted, the
checkpoints in the directory stay, and the next drain begins anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..channel.describe_ranks import Described, Gathered, gathering
from ..commit.courier_state import CourierState
from ..config import Config
from ..crash_points import reach
from ..errors import DrainFailed, MlflashError, text_of
from ..events import Event
from ..memory.disk_slot import DiskSlot
from ..memory.inventory import scan
from ..memory.node_directory import FIRST_ON_DISK
from ..memory.slot import Attempt, Kind, Slot, Use, Verdict
from ..mpi.background_collectives import BackgroundCollectives, in_thread
from ..mpi.job_thread import JobThread
from ..mpi.nonblocking import Operation, side_by_side
from ..mpi.world import World
from ..protect.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..state import layout
from ..storage.file_holes import FileWithHoles
from ..storage.store import Store, each, is_url, open_store
from . import checkpoint_directory, provenance
from .checkpoint_directory import Listing
from .consolidate import consolidate
from .drain_handle import Drain
from .index import RankFiles, encode_table
from .provenance import Signer
from .rank_content import (
    DrainInput,
    FileDigest,
    FileFormat,
    Origin,
    RankContent,
    Receipt,
    Survey,
    content_of,
    survey_of,
)

log = logging.getLogger("mlflash")

_FOLDERS = 8  # drained attempts whose folders are remembered
_LISTING_POLL_S = 0.001  # how often rank 0 checks whether the directory was read
_CHECKED_BLOCKS = 4  # of a slot; a checksum in a drained file covers so many
_CHUNK_NBYTES = 8 << 20  # bytes per write
_PACE_S = 0.2  # longest pause of a paced write: then it shows that it makes progress


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
        share = next(iter(pool.shares_of(attempt)), None)
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
                        time.sleep(_LISTING_POLL_S)
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
                if self._config.safetensors and context.world.rank == 0:
                    yield from self._consolidated(store, current)
            current.end(error)
            context.recorder.drained(current.step, current.seconds or 0.0, current.nbytes, current.path, error)

        self._courier.begin_background(moves())
        return current

    def _consolidated(self, store: Store, drain: Drain) -> Operation:
        """Write files for Hugging Face, too; whoever waits for the drain waits for them. Not collective."""
        has_moved = Event()
        folder, part, patience_s = os.path.basename(drain.path), self._config.safetensors, self._config.timeout_s
        for moved in in_thread(lambda: consolidate(store, drain.step, folder, part, has_moved.set, patience_s),
                               "mlflash-safetensors"):  # fmt: skip
            if has_moved.is_set():
                has_moved.clear()
                drain.note_progress()
            yield moved

    def _refuse_if_broken(self) -> None:
        if self._courier.broken is not None:
            raise DrainFailed("mlflash stopped after an earlier error", found=self._courier.broken)

    def _begin(self, slot: Slot, share: Slot | None) -> None:
        context, header = self._context, slot.header
        assert header is not None

        def open_own_home() -> dict[int, RankCheckpoint]:
            files: ShareFiles = {}
            if slot.manifest().shared is not None:
                node = context.world.node_index
                rows = scan(context.memory, node).of(header.attempt).rows
                are_here = (rows["file"] >= FIRST_ON_DISK) == isinstance(slot, DiskSlot)  # those that this drain holds
                shares = rows[(rows["kind"] == Kind.SHARE) & are_here]
                files = {(node, (int(row["shared_by"]), int(row["number"]))): int(row["file"]) for row in shares}
            return {context.world.rank: open_rank_checkpoint(context.pool.open, context.world.node_index, slot, files)}

        verdict = slot.verdict
        drain_input = DrainInput(
            header.attempt, header.step, context.world.size, open_own_home, header.mark,
            checks={"values": verdict.name.lower()} if verdict else {}, verdict=lambda: slot.verdict,
        )  # fmt: skip
        self.begin(drain_input, [held for held in (slot, share) if held is not None])


@dataclasses.dataclass
class DrainRun:
    """A drain on its way. Collective over the world."""

    drain: Drain
    drain_input: DrainInput
    world: World
    collectives: BackgroundCollectives
    store: Store
    config: Config
    signer: Signer
    cleans: bool  # whether what interrupted drains of earlier runs left is still to be deleted; for rank 0

    def __post_init__(self) -> None:
        self.inside = self.store  # the folder of this checkpoint, once it has one
        self.written: list[str] = []
        self.commits: list[str] = []  # those of them that mark the checkpoint as complete
        self.receipts: list[Receipt] = []
        self.described: dict[int, Described] = {}  # ranks whose files this rank writes

    def moves(self) -> Operation:
        """Run to the end, and return why it failed, or None. It raises nothing."""
        drain, ended = self.drain, list[MlflashError | None]()

        def main() -> Operation:
            ended.append((yield from self.run_or_undo()))

        def silent(ranks: Sequence[int]) -> None:
            drain.note_silent(ranks, self.world.names_of(ranks))

        yield from side_by_side(
            [main(), self.collectives.beat(lambda: drain.progress, lambda: bool(ended), drain.note_progress, silent)]
        )
        return ended[0]

    def run_or_undo(self) -> Operation:
        error: MlflashError | None = None
        step, world = self.drain.step, self.world
        try:
            try:
                yield from self.run()
            except MlflashError as problem:  # the same on all ranks
                error = problem
                yield from self.undo()
        except Exception as problem:  # the courier must continue
            log.exception("the drain of step %d failed on rank %d", step, world.rank)
            error = DrainFailed(f"the drain failed: {text_of(problem)}", rank=world.rank, step=step)
        if error is None and world.rank == 0:
            log.info("step %d was drained to %s", step, self.drain.path)
        elif error is not None and world.rank in (0, error.rank):
            log.warning("step %d was not drained: %s", step, error)
        reach("drain.ended")
        return error

    def run(self) -> Operation:
        reach("drain.begun")
        world, collectives, drain_input = self.world, self.collectives, self.drain_input
        survey: Survey
        survey, folder = yield from self._together(self._prepare)
        folder = yield from collectives.broadcast(folder)
        self.inside = self.store.at(folder)
        self.drain.path, self.drain.inside, self.drain.attempt = self.inside.path, self.inside, drain_input.attempt
        hosts = yield from collectives.gather((min(drain_input.homes, default=drain_input.world_size), survey.sets))
        sets = {rank: by for _, rank_sets in hosts for rank, by in rank_sets.items()}
        lowest = min(range(world.size), key=lambda process: hosts[process][0])
        table: list[bytes] = yield from collectives.broadcast(survey.table, lowest)
        is_held = [all(digest in held for held in survey.digests.values()) for digest in table]
        alike = yield from collectives.least_of(np.array(is_held, dtype=np.uint8))
        common = [digest for digest, is_alike in zip(table, alike, strict=True) if is_alike]
        reach("drain.dealt")

        def write() -> None:
            for rank, home in drain_input.homes.items():
                entries = [home.manifest.entries[survey.digests[rank][digest]] for digest in common]
                size = drain_input.world_size
                self._write(
                    rank, content_of(rank, home, entries, survey, sets, size, _CHECKED_BLOCKS * layout.BLOCK_NBYTES)
                )

        _, error = yield from collectives.in_turn(self.config.drain_writers, lambda: self._attempt(write))
        yield from collectives.raise_together(error)
        reach("drain.written")
        gathered = yield from self._gather()
        self._list_no_more_than_it_may(gathered, len({*sets.values()}))
        gathered_receipts = yield from collectives.collect(self.receipts)
        receipts = sorted((r for of_rank in gathered_receipts for r in of_rank), key=lambda receipt: receipt.rank)
        yield from self._together(lambda: self._commit(receipts, gathered))
        reach("drain.committed")
        if world.rank == 0:
            yield from in_thread(self._delete_surplus, "mlflash-drain")

    def undo(self) -> Operation:
        """Delete what was written, beginning with the file that marks it as complete."""
        # In reverse order: the files written first tell which job the others belong to.
        rest = [name for name in reversed(self.written) if name not in self.commits]
        for names in (self.commits, rest):
            yield from in_thread(functools.partial(self._delete, names), "mlflash-drain")
            yield from self.collectives.least_of(np.zeros(1, dtype=np.int64))
        if self.world.rank == 0 and self.inside is not self.store:
            yield from self._attempt(self.inside.remove_directory)

    def _attempt(self, work: Callable[[], Any]) -> Operation:
        error: MlflashError | None = None
        result: Any = None
        try:
            result = yield from in_thread(work, "mlflash-drain")
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # h5py, torch and fsspec may raise anything
            what = f"[Errno {problem.errno}] {problem.strerror}" if isinstance(problem, OSError) else repr(problem)
            error = DrainFailed(f"{what} in {self.inside.path}: this checkpoint is in memory only")
            error.__cause__ = problem
        if error is not None:
            error.rank, error.node, error.step = self.world.rank, self.world.node_name, self.drain.step
        self.drain.progress += 1
        return result, error

    def _together(self, work: Callable[[], Any]) -> Operation:
        """Do something on a thread, on all ranks; raise on all ranks what goes wrong on any."""
        result, error = yield from self._attempt(work)
        yield from self.collectives.raise_together(error)
        return result

    def _prepare(self) -> tuple[Survey, str]:
        # This imports a library: if that fails on one rank, all learn of it here.
        self.file_format = _file_format(self.config)
        if self.world.rank:
            return survey_of(self.drain_input), ""
        if self.cleans:  # the first drain of a run may make the directory; later it must exist
            self.store.make()
            with _deleting("what interrupted drains left"):
                checkpoint_directory.delete_leftovers(self.store, self.config.owner, self.drain_input.attempt.run_id)
                self.cleans = False
        folder = checkpoint_directory.new_folder(self.store, self.drain_input.step)
        self.inside = self.store.at(folder)
        self.inside.make(parents=False)
        return survey_of(self.drain_input), folder

    def _gather(self) -> Operation:
        steps, answer = gathering(self.described), None
        while True:
            try:
                verb, value = steps.send(answer)
            except StopIteration as end:
                return end.value
            if verb == "gather":
                answer = yield from self.collectives.gather(value)
            else:
                answer = yield from self.collectives.least_of(np.array(value, dtype=np.int64))

    def _list_no_more_than_it_may(self, gathered: Gathered, sets: int) -> None:
        """Do not list pieces of tensors for rank 0 if all ranks together have too many of them."""
        pieces = 0
        for group in gathered.groups:
            structure = group.structure
            own = len(structure.names) - len(structure.alike) - len(structure.shared)
            pieces += len(group.ranks) * own + sets * len(structure.shared) + len(structure.alike)
        if pieces <= self.file_format.most_pieces:
            return
        self.receipts = [dataclasses.replace(receipt, pieces=[]) for receipt in self.receipts]
        if self.world.rank == 0:
            log.info("step %d: the last file shows no tensor whole, as ranks hold %d pieces", self.drain.step, pieces)

    def _write(self, rank: int, rank_content: RankContent) -> None:
        self.described[rank] = rank_content.rank
        self.drain.progress += 1
        files, receipt = self.file_format.rank_files(self.drain_input, rank, rank_content, self.config.owner)
        self.drain.nbytes += sum(skeleton.nbytes for _, skeleton in files)
        at_once = min(self.config.drain_writers or self.world.size, self.world.size)
        with _closing(files):
            origin, digests = Origin.of(rank_content.home), _digests(files)
            for name, skeleton in files:
                self.written.append(name)
                content = _paced(skeleton.stream(_CHUNK_NBYTES), self.drain, self.config.drain_rate / at_once)
                self.inside.write(name, content, checkpoint_directory.tag(self.drain_input.attempt, self.config.owner))
        self.receipts.append(dataclasses.replace(receipt, origin=origin, digests=digests))
        self.drain.stored[rank] = receipt.files

    def _commit(self, receipts: list[Receipt], gathered: Gathered) -> None:
        """Write the provenance, and then the file that commits the checkpoint (rank 0)."""
        if self.world.rank:
            return
        if [receipt.rank for receipt in receipts] != list(range(self.drain_input.world_size)):
            raise DrainFailed("some ranks of the checkpoint did not hand in their state",
                              expected=f"{self.drain_input.world_size} ranks", found=len(receipts))  # fmt: skip
        rank_files = [receipt.files for receipt in receipts]
        each(self._refuse_missing, rank_files)
        text = encode_table(self.file_format.name, self.config.job, rank_files, gathered)
        files = self.file_format.master_files(self.drain_input, text, receipts, self.config.job, self.config.owner)
        config, tag = self.config, checkpoint_directory.tag(self.drain_input.attempt, self.config.owner)
        verdict = self._write_verdict(Verdict.UNKNOWN)
        with _closing(files):
            documents = provenance.files(self.signer, self.drain_input, receipts, _digests(files),
                                         self.file_format.name, config.job, config.owner, time.time_ns())  # fmt: skip
            for name, content in documents:
                self.written.append(name)
                self.inside.write(name, [content], tag)
            for name, skeleton in files:
                self.written.append(name)
                self.commits.append(name)
                reach("drain.committing")
                self.inside.write(name, skeleton.stream(_CHUNK_NBYTES), tag)
        self._write_verdict(verdict)  # who marked the step before it was listed here has marked it in memory only

    def _write_verdict(self, written: Verdict) -> Verdict:
        """Write what is known by now about the values, if that is not written yet; return it."""
        verdict = self.drain_input.verdict()
        if verdict is not written:
            self.written.append(checkpoint_directory.VERDICT)
            checkpoint_directory.write_verdict(self.inside, self.drain_input.attempt, self.config.owner, verdict)
        return verdict

    def _refuse_missing(self, stored: RankFiles) -> None:
        """Check that the files of a rank exist: a checkpoint with a missing file must not be committed."""
        for name, nbytes in {stored.card: stored.nbytes, stored.data: stored.data_nbytes}.items():  # one file in HDF5
            size = self.inside.nbytes(name)
            if size != nbytes:
                raise DrainFailed(
                    "a file has another size than what was written", expected=f"{nbytes} bytes in {name}", found=size
                )
        self.drain.progress += 1

    def _delete(self, names: list[str]) -> None:
        with _deleting(f"what was drained of step {self.drain.step}"):
            for name in names:
                self.inside.remove(name)

    def _delete_surplus(self) -> None:
        with _deleting("older checkpoints"):
            listed, config = checkpoint_directory.list_checkpoints(self.store), self.config
            for surplus in checkpoint_directory.surplus(listed, config.owner, config.keep_last, config.keep_every):
                checkpoint_directory.delete(self.store, surplus)


@contextlib.contextmanager
def _deleting(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:  # the next drain, or the next run, tries again
        log.warning("%s could not be deleted: %s", what, problem)


def _file_format(config: Config) -> FileFormat:
    if config.format == "dcp":
        from .dcp_format import Dcp

        return Dcp()
    from .hdf5_format import Hdf5

    return Hdf5(config.compression)


def _digests(files: Iterable[tuple[str, FileWithHoles]]) -> tuple[FileDigest, ...]:
    return tuple(FileDigest(name, file.nbytes, file.digest_beside_tensors(_CHUNK_NBYTES)) for name, file in files)


@contextlib.contextmanager
def _closing(files: Iterable[tuple[str, FileWithHoles]]) -> Iterator[None]:
    try:
        yield
    finally:
        for _, skeleton in files:
            skeleton.close()


def _paced(content: Iterable[memoryview], drain: Drain, rate: float) -> Iterator[memoryview]:
    start, sent = time.monotonic(), 0
    for piece in content:
        if drain.given_up.is_set():
            raise DrainFailed("the Checkpointer was left")
        yield piece
        sent += piece.nbytes
        drain.written += piece.nbytes
        drain.progress += 1
        while rate and (ahead := sent / rate - (time.monotonic() - start)) > 0 and not drain.given_up.is_set():
            drain.given_up.wait(min(ahead, _PACE_S))
            drain.progress += 1
