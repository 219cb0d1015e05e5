"""The courier's part of a restore: it chooses a checkpoint, fetches it, and restores its redundancy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ..draining import checkpoint_directory
from ..draining.checkpoint_directory import Listed
from ..draining.drain_queue import DrainQueue
from ..errors import CorruptSlot
from ..memory.inventory import file_number, write_verdict
from ..memory.shared_memory_segment import Segment
from ..memory.slot import Slot
from ..memory.slot_header import Attempt, Verdict
from ..memory.wanted_step import WantedStep
from ..protocol import messages as asked
from ..protocol.messages import FoundInMemory, Message
from ..redundancy.rank_checkpoint import RankCheckpoint, open_rank_checkpoint
from ..restoring import from_memory
from ..restoring.choose_source import Sources
from ..restoring.exchange_fragments import exchange
from ..restoring.heal import heal_or_remember
from ..restoring.open_in_memory import FoundElsewhere
from ..startup.certification import Saved
from ..startup.context import Context


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A checkpoint of this rank that was found and verified, for a restore that follows at once."""

    home: RankCheckpoint
    asked: WantedStep
    generation: int  # of the newest attempt at that time: a later save may have overwritten the checkpoint


class FoundCheckpoints:
    """The checkpoints found for restores, and a table of handlers of the messages about them."""

    def __init__(self, context: Context, drains: DrainQueue):
        self._context, self._drains, self._sources = context, drains, Sources(context, drains)
        self._checked: _Checked | None = None
        self._found: RankCheckpoint | FoundElsewhere | None = None  # the newest; stays mapped until the next one
        self._attempt: Attempt | None = None  # of what was found in memory; None: a directory was chosen
        self.table: dict[type[Message], Callable[..., Any]] = {
            asked.Choose: self._choose,
            asked.Exchange: self._exchange,
            asked.HoldOlder: lambda message: self._hold_older(context.pool.own[message.own]),
            asked.HealFirst: lambda message: self._heal_first(context.pool.own[message.own]),
            asked.Restored: self._restored,
            asked.HealRestored: lambda message: self._heal(context.pool.own[message.own]),
            asked.Steps: self._steps,
            asked.Mark: self._mark,
        }

    def _choose(self, message: asked.Choose) -> FoundInMemory | Listed | None:
        context = self._context
        if message.again and (home := self._take_checked(message.wanted)) is not None:
            return self._told(home)
        self._unmap()
        found = self._sources.choose(message.wanted, message.others, message.source, message.bad, message.checked)
        self._attempt = None
        if not isinstance(found, (RankCheckpoint, FoundElsewhere)):
            return found
        self._found = found
        if message.remember and isinstance(found, RankCheckpoint):
            self._checked = _Checked(found, message.wanted, context.generation)
        return self._told(found)

    def _take_checked(self, wanted: WantedStep) -> RankCheckpoint | None:
        """Take what was just verified. None if something else is wanted, or if it may have changed. Collective."""
        checked, self._checked = self._checked, None
        if checked is None:  # the same on all ranks
            return None
        home, context = checked.home, self._context
        same = checked.asked == wanted or wanted == WantedStep(home.header.step)
        same = same and checked.generation == context.generation and any(home.slot is own for own in context.pool.own)
        return home if context.world.agree([int(same)])[0] else None

    def _told(self, found: RankCheckpoint | FoundElsewhere) -> FoundInMemory:
        context = self._context
        told = (context.rolled_forward, context.restored_from)
        self._attempt = found.header.attempt if isinstance(found, RankCheckpoint) else found.attempt
        if isinstance(found, RankCheckpoint):
            own = next(number for number, slot in enumerate(context.pool.own) if slot is found.slot)
            header = found.header
            return FoundInMemory(header.attempt, header.step, context.restores, own, {}, found.files, *told)
        homes = {rank: file_number(home.slot.name) for rank, home in found.homes.items()}
        return FoundInMemory(found.attempt, found.step, found.restores, None, homes, found.files, *told)

    def _mapped(self) -> dict[int, Segment]:
        """The mapped segments, of this rank's slots and of what was found, by inode."""
        homes = [self._found] if isinstance(self._found, RankCheckpoint) else []
        homes += [*self._found.homes.values()] if isinstance(self._found, FoundElsewhere) else []
        slots = [slot for home in homes for slot in (home.slot, *home.shares)]
        found = {slot.segment.inode: slot.segment for slot in slots if slot.segment is not None and slot.view.nbytes}
        return {**found, **self._context.pool.mapped()}

    def _unmap(self) -> None:
        """Unmap what was found before, except this rank's own slots."""
        found, self._found = self._found, None
        if found is not None:
            homes = [found] if isinstance(found, RankCheckpoint) else [*found.homes.values()]
            self._context.pool.unmap_others(slot for home in homes for slot in (home.slot, *home.shares))

    def _exchange(self, message: asked.Exchange) -> bool:
        """Send the parts that other ranks ask for, and get those that this rank asks for. Collective over the world."""
        context = self._context
        if context.world.agree([int(not message.asked)])[0]:
            return True
        homes: dict[int, RankCheckpoint] = {}
        try:
            context.world.on_all(lambda: self._open(message, homes))
            has = {rank: (home.reader(), home.manifest.entries) for rank, home in homes.items()}
            good = exchange(context, has, message.asked)
        finally:
            context.pool.unmap_others(slot for home in homes.values() for slot in (home.slot, *home.shares))
        nbytes = sum(part.target.nbytes for parts in message.asked.values() for part in parts)
        context.recorder.counts["bytes asked of other nodes"] += nbytes
        return good

    def _open(self, message: asked.Exchange, homes: dict[int, RankCheckpoint]) -> None:
        context, mapped = self._context, self._mapped()
        open_file: Callable[[int], Slot] = lambda number: context.pool.open(number, mapped)
        for rank, file in message.homes.items():
            slot = open_file(file)
            if slot.header is None or (slot.header.attempt, slot.header.rank) != (message.attempt, rank):
                raise CorruptSlot(f"{slot.name} no longer holds the checkpoint that is being read", rank=rank)
            homes[rank] = open_rank_checkpoint(open_file, context.world.node_index, slot, message.files)

    def _hold_older(self, home: Slot) -> None:
        """Protect the step before from saves, whether the restored one can be loaded or not.

        Until the copies of the restored step are made, only the step before survives the loss of a node.
        """
        self._context.pool.hold_older()
        self._context.unhealed = home

    def _heal_first(self, home: Slot) -> None:
        """Heal before what was found is read or put together anew, if that needs it. Collective over the world.

        If a step was rolled forward, no other slots may have it. And a rank whose slot came from another node may hold
        a slot that is another rank's: it is freed when that rank's is protected, and a new state needs one.
        """
        context = self._context
        if context.rolled_forward or not context.world.agree([int(context.pool.has_room)])[0]:
            heal_or_remember(context, home)

    def _restored(self, message: asked.Restored) -> None:
        context = self._context
        context.gives_way = True  # newer steps that could not be restored may now be deleted to make room
        context.examiner.forget()
        self._drains.restored(self._attempt)
        if message.own is not None:
            home = context.pool.own[message.own]
            from_memory.count(context, home)
            context.unhealed = None  # the heal comes now, and saves wait for it
            assert home.header is not None
            is_suspect = context.restored_verdict in (Verdict.SUSPECT, Verdict.BAD)
            context.certification.restored(Saved(home.header.attempt, home.header.step), is_suspect)

    def _heal(self, home: Slot) -> None:
        context, recorder = self._context, self._context.recorder
        start, step = time.perf_counter(), 0 if home.header is None else home.header.step
        before = recorder.counts["slots healed"]
        heal_or_remember(context, home)
        recorder.healed(step, time.perf_counter() - start, recorder.counts["slots healed"] > before)
        recorder.holds(context.pool.nbytes)

    def _mark(self, message: asked.Mark) -> int:
        """Write a verdict on a step into all files that hold it. Collective over the world."""
        context, verdict = self._context, Verdict.GOOD if message.is_good else Verdict.BAD
        world = context.world
        mine: set[Attempt] = set()
        folders: list[str] = []

        def write() -> None:
            if world.local_rank == 0:
                mine.update(write_verdict(context.memory, message.step, verdict))

        world.on_all(write)
        found = frozenset(attempt for those in world.gather([*mine]) for attempt in those)
        listed, store = self._drains.look().listed, self._drains.store

        def write_folders() -> None:
            if world.rank == 0 and store is not None:
                folders.extend(checkpoint_directory.mark(store, listed, message.step, verdict))

        world.on_all(write_folders)
        context.certification.mark(found, message.is_good)
        if message.is_good and context.certification.certified is not None:
            context.examiner.forget()  # from now on the present values are the normal ones
        return len(found) + int(world.broadcast(len(folders), 0))

    def _steps(self, message: asked.Steps) -> list[int]:
        context, alike = self._context, message.alike
        size = context.world.size
        drained = {one.step for one in self._drains.look().listed if not alike or one.card.world_size == size}
        return sorted(drained.union(from_memory.restorable_steps(context, alike=alike)))
