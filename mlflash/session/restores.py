"""The courier's part of a restore: it chooses a checkpoint, fetches it, and restores its redundancy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from ..courier.records import FoundInMemory
from ..courier.state import CourierState, Saved
from ..courier.wanted_parts import WantedPart
from ..drain import checkpoint_directory
from ..drain.checkpoint_directory import Listed
from ..drain.queue import DrainQueue
from ..errors import CorruptSlot
from ..memory.inventory import write_verdict
from ..memory.node_directory import file_number
from ..memory.shared_memory_segment import Segment
from ..memory.slot import Attempt, Slot, Verdict
from ..memory.wanted_step import WantedStep
from ..protect.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..restore import fetch
from ..restore.choose import Sources
from ..restore.exchange_fragments import exchange
from ..restore.open_in_memory import FoundElsewhere
from ..restore.reprotect import heal_or_remember


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A checkpoint of this rank that was found and verified, for a restore that follows at once."""

    home: RankCheckpoint
    asked: WantedStep
    generation: int  # of the newest attempt at that time: a later save may have overwritten the checkpoint


class RestoreSession:
    """What a trainer calls to restore. All of it is collective over the world, and done in jobs."""

    context: CourierState
    _drains: DrainQueue
    _sources: Sources

    def __init__(self) -> None:
        self._checked: _Checked | None = None
        self._found: RankCheckpoint | FoundElsewhere | None = None  # the newest; stays mapped until the next one
        self._attempt: Attempt | None = None  # of what was found in memory; None: a directory was chosen

    def choose(self, wanted: WantedStep, others: bool, source: str | None, bad: Mapping[str, str], checked: bool,
               again: bool, remember: bool) -> FoundInMemory | Listed | None:  # fmt: skip
        """Choose between memory and directory, and fetch a checkpoint in memory to where it can be read.

        Args:
            others: whether checkpoints of another number of ranks count, too.
            source: another directory, to be used instead of memory; None: memory and the job's own directory.
            bad: folders of the directory to skip, and why.
            checked: whether to verify every byte of what is in memory.
            again: whether to take the checkpoint just chosen with ``remember``, if it fits and is unchanged.
            remember: whether to remember the checkpoint for the next call.
        """
        context = self.context
        if again and (home := self._take_checked(wanted)) is not None:
            return self._told(home)
        self._unmap()
        found = self._sources.choose(wanted, others, source, bad, checked)
        self._attempt = None
        if not isinstance(found, (RankCheckpoint, FoundElsewhere)):
            return found
        self._found = found
        if remember and isinstance(found, RankCheckpoint):
            self._checked = _Checked(found, wanted, context.generation)
        return self._told(found)

    def _take_checked(self, wanted: WantedStep) -> RankCheckpoint | None:
        """Take what was just verified. None if something else is wanted, or if it may have changed. Collective."""
        checked, self._checked = self._checked, None
        if checked is None:  # the same on all ranks
            return None
        home, context = checked.home, self.context
        same = checked.asked == wanted or wanted == WantedStep(home.header.step)
        same = same and checked.generation == context.generation and any(home.slot is own for own in context.pool.own)
        return home if context.world.all_of(same) else None

    def _told(self, found: RankCheckpoint | FoundElsewhere) -> FoundInMemory:
        context = self.context
        told = (context.restored.rolled_forward, context.restored.source)
        self._attempt = found.header.attempt if isinstance(found, RankCheckpoint) else found.attempt
        if isinstance(found, RankCheckpoint):
            own = next(number for number, slot in enumerate(context.pool.own) if slot is found.slot)
            header = found.header
            return FoundInMemory(header.attempt, header.step, context.restored.restores, own, {}, found.files, *told)
        homes = {rank: file_number(home.slot.name) for rank, home in found.homes.items()}
        return FoundInMemory(found.attempt, found.step, found.restores, None, homes, found.files, *told)

    def _mapped(self) -> dict[int, Segment]:
        """The mapped segments, of this rank's slots and of what was found, by inode."""
        homes = [self._found] if isinstance(self._found, RankCheckpoint) else []
        homes += [*self._found.homes.values()] if isinstance(self._found, FoundElsewhere) else []
        slots = [slot for home in homes for slot in (home.slot, *home.shares)]
        found = {slot.segment.inode: slot.segment for slot in slots if slot.segment is not None and slot.view.nbytes}
        return {**found, **self.context.pool.mapped()}

    def _unmap(self) -> None:
        """Unmap what was found before, except this rank's own slots."""
        found, self._found = self._found, None
        if found is not None:
            homes = [found] if isinstance(found, RankCheckpoint) else [*found.homes.values()]
            self.context.pool.unmap_others(slot for home in homes for slot in (home.slot, *home.shares))

    def exchange(self, attempt: Attempt, homes: Mapping[int, int], files: ShareFiles,
                 asked: Mapping[int, Sequence[WantedPart]]) -> bool:  # fmt: skip
        """Send parts of what is in memory that other ranks ask for, and get those that this rank asks for, by rank.

        ``homes``: by old rank, the numbers of the files that this rank reads for others. Returns whether all arrived
        intact.
        """
        context = self.context
        if not context.world.any_of(asked):
            return True
        opened: dict[int, RankCheckpoint] = {}
        try:
            context.world.on_all(lambda: self._open(attempt, homes, files, opened))
            has = {rank: (home.reader(), home.manifest.entries) for rank, home in opened.items()}
            good = exchange(context, has, asked)
        finally:
            context.pool.unmap_others(slot for home in opened.values() for slot in (home.slot, *home.shares))
        nbytes = sum(part.target.nbytes for parts in asked.values() for part in parts)
        context.recorder.counts["bytes asked of other nodes"] += nbytes
        return good

    def _open(self, attempt: Attempt, homes: Mapping[int, int], files: ShareFiles, opened: dict[int, RankCheckpoint]
              ) -> None:  # fmt: skip
        context, mapped = self.context, self._mapped()
        open_file: Callable[[int], Slot] = lambda number: context.pool.open(number, mapped)
        for rank, file in homes.items():
            slot = open_file(file)
            if slot.header is None or (slot.header.attempt, slot.header.rank) != (attempt, rank):
                raise CorruptSlot(f"{slot.name} no longer holds the checkpoint that is being read", rank=rank)
            opened[rank] = open_rank_checkpoint(open_file, context.world.node_index, slot, files)

    def hold_older(self, own: int) -> None:
        """Protect the step before from saves, whether the restored one, in own slot ``own``, can be loaded or not.

        Until the copies of the restored step are made, only the step before survives the loss of a node.
        """
        self.context.pool.hold_older()
        self.context.unhealed = self.context.pool.own[own]

    def heal_first(self, own: int) -> None:
        """Heal before what was found, in own slot ``own``, is read or put together anew, if that needs it.

        If a step was rolled forward, no other slots may have it. And a rank whose slot came from another node may hold
        a slot that is another rank's: it is freed when that rank's is protected, and a new state needs one.
        """
        context = self.context
        if context.restored.rolled_forward or not context.world.all_of(context.pool.has_free):
            heal_or_remember(context, context.pool.own[own])

    def restored(self, own: int | None) -> None:
        """Note that a step was restored, from own slot ``own``; None: it was put together, or came from a directory."""
        context = self.context
        context.gives_way = True  # newer steps that could not be restored may now be deleted to make room
        context.examiner.forget()
        self._drains.restored(self._attempt)
        if own is not None:
            home = context.pool.own[own]
            fetch.count(context, home)
            context.unhealed = None  # the heal comes now, and saves wait for it
            assert home.header is not None
            is_suspect = context.restored.verdict in (Verdict.SUSPECT, Verdict.BAD)
            context.certification.restored(Saved(home.header.attempt, home.header.step), is_suspect)

    def heal_restored(self, own: int) -> None:
        """Restore the redundancy of the restored step, which own slot ``own`` holds."""
        context, recorder, home = self.context, self.context.recorder, self.context.pool.own[own]
        start, step = time.perf_counter(), 0 if home.header is None else home.header.step
        before = recorder.counts["slots healed"]
        heal_or_remember(context, home)
        recorder.healed(step, time.perf_counter() - start, recorder.counts["slots healed"] > before)
        recorder.holds(context.pool.nbytes)

    def mark(self, step: int, is_good: bool) -> int:
        """Write a verdict on a step into all files that hold it; return in how many places it was found."""
        context, verdict = self.context, Verdict.GOOD if is_good else Verdict.BAD
        world = context.world
        mine: set[Attempt] = set()
        folders: list[str] = []

        def write() -> None:
            if world.local_rank == 0:
                mine.update(write_verdict(context.memory, step, verdict))

        world.on_all(write)
        found = frozenset(attempt for those in world.gather([*mine]) for attempt in those)
        listed, store = self._drains.look().listed, self._drains.store

        def write_folders() -> None:
            if world.rank == 0 and store is not None:
                folders.extend(checkpoint_directory.mark(store, listed, step, verdict))

        world.on_all(write_folders)
        context.certification.mark(found, is_good)
        if is_good and context.certification.certified is not None:
            context.examiner.forget()  # from now on the present values are the normal ones
        return len(found) + int(world.broadcast(len(folders), 0))

    def steps(self, alike: bool) -> list[int]:
        """List the steps that can be restored, according to headers; ``alike``: only those of as many ranks as now."""
        context = self.context
        size = context.world.size
        drained = {one.step for one in self._drains.look().listed if not alike or one.card.world_size == size}
        return sorted(drained.union(fetch.restorable_steps(context, alike=alike)))
