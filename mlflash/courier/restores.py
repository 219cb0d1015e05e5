"""What the courier does for a restore: it chooses a checkpoint, brings it, and makes its redundancy whole again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ..draining.checkpoint_directory import Listed
from ..draining.drain_queue import DrainQueue
from ..errors import CorruptSlot
from ..memory.inventory import file_number
from ..memory.shared_memory_segment import Segment
from ..memory.slot import Slot
from ..protocol import messages as asked
from ..protocol.messages import FoundInMemory, Message
from ..redundancy.rank_checkpoint import RankCheckpoint, open_rank_checkpoint
from ..restoring import from_memory
from ..restoring.choose_source import Sources
from ..restoring.exchange_fragments import exchange
from ..restoring.found import FoundElsewhere
from ..restoring.heal import heal_or_remember
from ..startup.context import Context


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A checkpoint of this rank that was found and verified, for a restore that comes at once.

    Attributes:
        home: it.
        asked: the step that was asked for; None: the newest.
        generation: of the newest attempt when it was found: a save since may have written over it.
    """

    home: RankCheckpoint
    asked: int | None
    generation: int


class FoundCheckpoints:
    """What was found for restores, and the handlers of their messages.

    Args:
        context: this rank's slots and communicators.
        drains: knows what is in the directory.

    Attributes:
        table: the handlers.
    """

    def __init__(self, context: Context, drains: DrainQueue):
        self._context, self._drains, self._sources = context, drains, Sources(context, drains)
        self._checked: _Checked | None = None
        self._found: RankCheckpoint | FoundElsewhere | None = None  # the newest; mapped until the next one
        self.table: dict[type[Message], Callable[..., Any]] = {
            asked.Choose: self._choose,
            asked.Exchange: self._exchange,
            asked.HoldOlder: lambda message: self._hold_older(context.pool.own[message.own]),
            asked.HealFirst: lambda message: heal_or_remember(context, context.pool.own[message.own]),
            asked.Restored: self._restored,
            asked.HealRestored: lambda message: self._heal(context.pool.own[message.own]),
            asked.Steps: self._steps,
        }

    def _choose(self, message: asked.Choose) -> FoundInMemory | Listed | None:
        context = self._context
        if message.again and (home := self._take_checked(message.step)) is not None:
            return self._told(home)
        self._unmap()
        found = self._sources.choose(message.step, message.others, message.source, message.bad, message.checked)
        if not isinstance(found, (RankCheckpoint, FoundElsewhere)):
            return found
        self._found = found
        if message.remember and isinstance(found, RankCheckpoint):
            self._checked = _Checked(found, message.step, context.generation)
        return self._told(found)

    def _take_checked(self, step: int | None) -> RankCheckpoint | None:
        """Take what was verified just now; None where it is something else, or may have changed since. Collective."""
        checked, self._checked = self._checked, None
        if checked is None:  # on all ranks
            return None
        home, context = checked.home, self._context
        same = checked.asked is None if step is None else step == home.header.step
        same = same and checked.generation == context.generation and any(home.slot is own for own in context.pool.own)
        return home if context.world.agree([int(same)])[0] else None

    def _told(self, found: RankCheckpoint | FoundElsewhere) -> FoundInMemory:
        context = self._context
        told = (context.rolled_forward, context.restored_from)
        if isinstance(found, RankCheckpoint):
            own = next(number for number, slot in enumerate(context.pool.own) if slot is found.slot)
            header = found.header
            return FoundInMemory(header.attempt, header.step, context.restores, own, {}, found.files, *told)
        homes = {rank: file_number(home.slot.name) for rank, home in found.homes.items()}
        return FoundInMemory(found.attempt, found.step, found.restores, None, homes, found.files, *told)

    def _mapped(self) -> dict[int, Segment]:
        """What is mapped, of this rank's slots and of what was found, by inode."""
        homes = [self._found] if isinstance(self._found, RankCheckpoint) else []
        homes += [*self._found.homes.values()] if isinstance(self._found, FoundElsewhere) else []
        slots = [slot for home in homes for slot in (home.slot, *home.shares)]
        found = {slot.segment.inode: slot.segment for slot in slots if slot.segment is not None and slot.view.nbytes}
        return {**found, **self._context.pool.mapped()}

    def _unmap(self) -> None:
        """Unmap what was found before, but for this rank's own slots."""
        found, self._found = self._found, None
        if found is not None:
            homes = [found] if isinstance(found, RankCheckpoint) else [*found.homes.values()]
            self._context.pool.unmap_others(slot for home in homes for slot in (home.slot, *home.shares))

    def _exchange(self, message: asked.Exchange) -> bool:
        """Serve parts of what this rank reads, and get those that it asks for. Collective over the world."""
        context = self._context
        if context.world.agree([int(not message.asked)])[0]:
            return True
        homes: dict[int, RankCheckpoint] = {}
        try:
            context.world.on_all(lambda: self._open(message, homes))
            has = {rank: (home.reader(), home.manifest.entries) for rank, home in homes.items()}
            good = exchange(context, has, message.asked)
        finally:
            mapped = self._mapped()
            for home in homes.values():
                for slot in (home.slot, *home.shares):
                    if slot.segment is not None and slot.segment is not mapped.get(slot.segment.inode):
                        slot.segment.close()
        nbytes = sum(part.target.nbytes for parts in message.asked.values() for part in parts)
        context.recorder.counts["bytes asked of other nodes"] += nbytes
        return good

    def _open(self, message: asked.Exchange, homes: dict[int, RankCheckpoint]) -> None:
        context, mapped = self._context, self._mapped()
        open_file: Callable[[int], Slot] = lambda number: context.pool.open(number, mapped)
        for rank, file in message.homes.items():
            slot = open_file(file)
            if slot.header is None or (slot.header.attempt, slot.header.rank) != (message.attempt, rank):
                raise CorruptSlot(f"{slot.name} does not hold any more what is read", rank=rank)
            homes[rank] = open_rank_checkpoint(open_file, context.world.node_index, slot, message.files)

    def _hold_older(self, home: Slot) -> None:
        """Keep saves from the step before, whether the restored one can be loaded or not.

        Until its copies are made only that covers a lost node.
        """
        self._context.pool.hold_older()
        self._context.unhealed = home

    def _restored(self, message: asked.Restored) -> None:
        context = self._context
        context.gives_way = True  # what is newer, and could not be restored, has no claim to room any more
        if message.own is not None:
            from_memory.count(context, context.pool.own[message.own])
            context.unhealed = None  # the heal comes now, and saves wait for it

    def _heal(self, home: Slot) -> None:
        context, recorder = self._context, self._context.recorder
        start, step = time.perf_counter(), 0 if home.header is None else home.header.step
        before = recorder.counts["slots healed"]
        heal_or_remember(context, home)
        recorder.healed(step, time.perf_counter() - start, recorder.counts["slots healed"] > before)
        recorder.holds(context.pool.nbytes)

    def _steps(self, message: asked.Steps) -> list[int]:
        context, alike = self._context, message.alike
        size = context.world.size
        drained = {one.step for one in self._drains.listed() if not alike or one.card.world_size == size}
        return sorted(drained.union(from_memory.restorable_steps(context, alike=alike)))
