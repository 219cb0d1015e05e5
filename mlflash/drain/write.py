"""A committed checkpoint → a folder of the directory, in the background, straight from the slots.

    survey    each rank makes digests of what others may hold alike; rank 0 names the folder
    deal      what all ranks hold alike, and what sets of them share, is dealt out                2 gathers, 1 allreduce
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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..channel.describe_ranks import Described, Gathered, gathering
from ..config import Config
from ..crash_points import reach
from ..errors import DrainFailed, MlflashError, text_of
from ..memory.slot import Verdict
from ..mpi.background_collectives import BackgroundCollectives, in_thread
from ..mpi.nonblocking import Operation, side_by_side
from ..mpi.world import World
from ..state import layout
from ..storage.file_holes import FileWithHoles
from ..storage.store import Store, each
from . import checkpoint_directory, provenance
from .drain import Drain
from .index import Stored, encode_table
from .provenance import Signer
from .rank_input import DrainInput, FileDigest, FileFormat, Origin, RankContent, Receipt, Survey, content_of, survey_of

log = logging.getLogger("mlflash")

_CHECKED_BLOCKS = 4  # of a slot; a checksum in a drained file covers so many
_CHUNK_NBYTES = 8 << 20  # bytes per write
_LOOK_S = 0.2


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
        self.receipts: list[tuple[Stored, Receipt]] = []
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
        receipts = sorted((r for pairs in gathered_receipts for r in pairs), key=lambda pair: pair[1].rank)
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
        self.receipts = [(stored, dataclasses.replace(receipt, pieces=[])) for stored, receipt in self.receipts]
        if self.world.rank == 0:
            log.info("step %d: the last file shows no tensor whole, as ranks hold %d pieces", self.drain.step, pieces)

    def _write(self, rank: int, rank_content: RankContent) -> None:
        self.described[rank] = rank_content.rank
        self.drain.progress += 1
        files, stored, receipt = self.file_format.rank_files(
            self.drain_input, rank, self.drain_input.homes[rank], rank_content, self.config.owner
        )
        self.drain.nbytes += sum(skeleton.nbytes for _, skeleton in files)
        at_once = min(self.config.drain_writers or self.world.size, self.world.size)
        with _closing(files):
            origin, digests = Origin.of(self.drain_input.homes[rank]), _digests(files)
            for name, skeleton in files:
                self.written.append(name)
                content = _paced(skeleton.stream(_CHUNK_NBYTES), self.drain, self.config.drain_rate / at_once)
                self.inside.write(name, content, checkpoint_directory.tag(self.drain_input.attempt, self.config.owner))
        self.receipts.append((stored, dataclasses.replace(receipt, origin=origin, digests=digests)))
        self.drain.stored[rank] = stored

    def _commit(self, pairs: list[tuple[Stored, Receipt]], gathered: Gathered) -> None:
        """Write the provenance, and then the file that commits the checkpoint (rank 0)."""
        if self.world.rank:
            return
        if [receipt.rank for _, receipt in pairs] != list(range(self.drain_input.world_size)):
            raise DrainFailed("some ranks of the checkpoint did not hand in their state",
                              expected=f"{self.drain_input.world_size} ranks", found=len(pairs))  # fmt: skip
        each(self._refuse_missing, [stored for stored, _ in pairs])
        text = encode_table(self.file_format.name, self.config.job, [stored for stored, _ in pairs], gathered)
        receipts = [receipt for _, receipt in pairs]
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

    def _refuse_missing(self, stored: Stored) -> None:
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
    from .hdf5_files import Hdf5

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
            drain.given_up.wait(min(ahead, _LOOK_S))
            drain.progress += 1
