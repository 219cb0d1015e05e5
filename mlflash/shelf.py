"""The slots of this rank: two of its own, two for each rank whose copies it holds, two for its part of parity.

Where it shares state with others, two more for its share.

Two of each, because the last committed one is never written: a save goes into the other one. Where checkpoints are
drained there is a third own one, as one may be read for long.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from . import segment
from .board import Board, Word
from .comm import World
from .errors import CorruptSlot, MemoryTooSmall, MlflashError
from .header import Attempt
from .inventory import Files, file_name, file_number
from .layout import PAGE_NBYTES, round_up
from .limits import available
from .node_memory import NodeMemory
from .points import reach
from .slot import Slot, Use

log = logging.getLogger("mlflash")

_HEADROOM_NBYTES = 64 << 20  # what is left to others when the slots are allocated


class Shelf:
    """This rank's slots.

    Args:
        memory: this node's directory.
        owners: the ranks whose copies this rank holds, and itself where it holds parity.
        own: slots of its own; three where checkpoints are drained, as one of them may be read for long.
    """

    def __init__(self, memory: NodeMemory, owners: Sequence[int], own: int = 2):
        self._memory = memory
        self.own = [Slot() for _ in range(own)]
        self.shares = [Slot() for _ in range(own)]  # without files where nothing is shared
        self.inbox = {owner: [Slot(), Slot()] for owner in owners}
        self._distrusted: list[Slot] = []
        self._spare: set[int] = set()  # files to delete once nothing can need them
        self._kept: set[int] = set()  # files to delete once a newer step is committed
        self._stale: set[int] = set()  # those among them that do not hold the attempt restored
        self.aside: set[int] = set()  # files of this node that are left to themselves until a newer step is committed
        self.changed = threading.Condition()  # notified when a slot becomes free

    def all(self) -> list[Slot]:
        """All slots, own ones first."""
        return [*self.own, *self.shares, *(slot for pair in self.inbox.values() for slot in pair)]

    @property
    def nbytes(self) -> int:
        """Bytes of the node's memory that the files of this rank take."""
        return sum(slot.segment.nbytes for slot in self.all() if slot.segment is not None)

    def adopt(self, files: Files, kept: Attempt | None, trusted: Container[int], spare: Sequence[int],
              needed: Sequence[int] = ()) -> None:  # fmt: skip
        """Take over files that an earlier process left. Not collective.

        Args:
            files: which.
            kept: the attempt that must not be overwritten.
            trusted: numbers of this node's files that hold it; others that say so were found damaged.
            spare: files of this node that nobody needs, to be deleted by `drop_spare`.
            needed: files of this node that nobody will write, but which the attempt needs until a newer is committed.
        """
        before = self.mapped()
        self._distrusted = []
        for pair, numbers in [
            (self.own, files.own),
            (self.shares, files.share),
            *((self.inbox[q], files.inbox[q]) for q in self.inbox),
        ]:
            for index, number in enumerate(numbers):
                pair[index] = self._attach(number, before)
                self._judge(pair[index], kept, number in trusted)
        for inode, mapping in before.items():
            if inode not in self.mapped():
                mapping.close()
        self._kept = set(needed)
        self._spare, self._stale = set(spare), {number for number in spare if number not in trusted}
        segment.prefault_in_background([s.segment for s in self.all() if s.segment is not None])

    def mapped(self) -> dict[int, segment.Segment]:
        """The mappings of the slots, by inode of their files."""
        return {slot.segment.inode: slot.segment for slot in self.all() if slot.segment is not None}

    def unmap_others(self, slots: Iterable[Slot]) -> None:
        """Unmap those of some slots whose files are not among this rank's. Not collective."""
        in_use = self.mapped()
        for slot in slots:
            if slot.segment is not None and slot.segment.inode not in in_use:
                slot.segment.close()

    def _judge(self, slot: Slot, kept: Attempt | None, trusted: bool) -> None:
        if slot.header is not None and slot.header.attempt == kept:
            if trusted:
                slot.use = Use.HOLDS
            else:  # to be forgotten for good once the attempt is whole elsewhere
                slot.header = None
                self._distrusted.append(slot)

    def _attach(self, number: int | None, mapped: dict[int, segment.Segment]) -> Slot:
        if number is None:
            return Slot()
        try:
            return Slot(segment.attach(self._memory, file_name(number), mapped))
        except (CorruptSlot, FileNotFoundError):
            self._memory.remove(file_name(number))
            return Slot()

    def take(self, wait_s: float) -> tuple[Slot, Slot] | None:
        """Take an own slot and one for a share, for a save; None where both hold something or are busy for so long.

        Not collective.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._free_pair() is not None, wait_s)
            pair = self._free_pair()
            for slot in pair or ():
                slot.use = Use.BUSY
            return pair

    def give_back(self, taken: Iterable[Slot]) -> None:
        """Free slots that were taken for a save that does not come. Not collective."""
        with self.changed:
            for slot in taken:
                slot.use = Use.FREE
            self.changed.notify_all()

    def _free_pair(self) -> tuple[Slot, Slot] | None:
        own, share = self.free_slot(self.own), self.free_slot(self.shares)
        return None if own is None or share is None else (own, share)

    def drained(self, slots: Iterable[Slot]) -> None:
        """Let saves write slots again that were drained. Not collective."""
        with self.changed:
            for slot in slots:
                slot.drains = False
            self.changed.notify_all()

    def lend(self, slot: Slot) -> Slot:
        """Give a slot to be read for as long as anybody has views of it; what is written to these stays here.

        Not collective. Until then no save gets the slot that is lent.
        """
        lent = Slot(segment.attach(self._memory, slot.name, private=True))
        slot.lent += 1
        weakref.finalize(lent.view, self._returned, slot).atexit = False
        return lent

    def _returned(self, slot: Slot) -> None:
        with self.changed:
            slot.lent -= 1
            self.changed.notify_all()

    def free_slot(self, pair: Sequence[Slot]) -> Slot | None:
        """A slot of a pair that may be written; the one with the older content first."""
        free = [slot for slot in pair if slot.is_free]
        return min(free, key=lambda slot: slot.generation, default=None)

    @contextlib.contextmanager
    def reserved(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Keep the free ones of some slots from being taken for a save while their files are replaced; gives these."""
        with self.changed:
            taken = [slot for slot in slots if slot.is_free]
            for slot in taken:
                slot.use = Use.BUSY
        try:
            yield taken
        finally:
            with self.changed:
                for slot in taken:
                    slot.use = Use.FREE
                self.changed.notify_all()

    def release(self, attempt: Attempt, taken: Sequence[Slot], committed: bool) -> None:
        """End an attempt: committed, its slots hold it and all older ones are free; failed, its slots are free.

        Args:
            attempt: which.
            taken: the slots it was staged into; the others may be busy with the next save already.
            committed: how it ended.
        """
        with self.changed:
            for slot in [*taken, *(slot for pair in self.inbox.values() for slot in pair)]:
                if slot.use is Use.BUSY:
                    slot.use = Use.HOLDS if committed else Use.FREE
            for slot in self.all():
                if committed and slot.use is Use.HOLDS and (slot.header is None or slot.header.attempt != attempt):
                    slot.use = Use.FREE
            self.changed.notify_all()

    def keep_only(self, slots: Sequence[Slot]) -> None:
        """Free every slot but these (redundancy is whole in its new places), and unseal those found damaged."""
        with self.changed:
            for slot in self._distrusted:
                if slot.use is Use.FREE:
                    slot.unseal()
                    slot.use = Use.FREE
            self._distrusted = []
            for slot in self.all():
                if slot.use is Use.HOLDS and not any(slot is kept for kept in slots):
                    slot.use = Use.FREE
            self.changed.notify_all()

    def hold_older(self) -> None:
        """Keep what the own slots hold besides the restored step from being written, until `free_older`.

        Not collective.
        """
        with self.changed:
            for slot in (*self.own, *self.shares):
                if slot.use is Use.FREE and slot.header is not None:
                    slot.use = Use.HOLDS

    def free_older(self, kept: Attempt) -> None:
        """Let saves write the own slots that do not hold the restored attempt. Not collective."""
        with self.changed:
            for slot in (*self.own, *self.shares):
                if slot.use is Use.HOLDS and (slot.header is None or slot.header.attempt != kept):
                    slot.use = Use.FREE
            self.changed.notify_all()

    def keep_for_now(self, slot: Slot) -> None:
        """Keep the file of a slot that is none of this rank's until a newer step is committed. Not collective."""
        self._kept.add(file_number(slot.name))

    def drop_spare(self, committed: bool = False) -> None:
        """Delete the files that nobody needs; once a newer step is ``committed``, those kept until then too."""
        self._drop(self._spare | self._kept if committed else self._spare)
        if committed:
            self.aside.clear()

    def drop_aside(self) -> None:
        """Delete the files that were left to themselves. Not collective: the rank that keeps them deletes them."""
        self._drop(self._kept & self.aside)
        self.aside.clear()

    def drop_stale(self) -> None:
        """Delete those of them that hold older attempts only, so that a heal finds room."""
        self._drop(self._stale)

    def _drop(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            self._memory.remove(file_name(number))
        self._spare, self._stale, self._kept = self._spare - numbers, self._stale - numbers, self._kept - numbers

    def pin_own(self) -> None:
        """Page-lock, behind, the slots that this rank copies its state into. Not collective."""
        own = [slot.segment for slot in (*self.own, *self.shares) if slot.segment is not None]
        segment.prefault_in_background(own, pin=True)

    def post_directory(self, board: Board) -> None:
        """Write the file numbers of the own slots on the node's board."""
        for word, slot in zip((Word.OWN_SLOT_0, Word.OWN_SLOT_1, Word.OWN_SLOT_2), self.own, strict=False):
            board.put(word, file_number(slot.name) if slot.name else -1)

    def close(self) -> None:
        """Unmap everything; the files stay."""
        for slot in self.all():
            _unmap(slot)


def any_whole(slots: Iterable[Slot], verify: Callable[[Slot], object], what: str) -> bool:
    """Whether one of some slots, which hold the same, is whole; those found damaged before it are forgotten.

    Args:
        slots: sealed ones.
        verify: raises CorruptSlot where one is damaged.
        what: they hold, and on which rank, for the warning.
    """
    for slot in slots:
        try:
            verify(slot)
            return True
        except CorruptSlot as error:
            log.warning("%s is damaged and will be made again: %s", what, error)
            slot.unseal()
            slot.use = Use.FREE
    return False


def needs_room(slot: Slot, nbytes: int) -> bool:
    """Whether a slot must get a larger file before ``nbytes`` go into it."""
    return slot.use is not Use.HOLDS and not slot.drains and slot.view.nbytes < nbytes


def make_room(world: World, board: Board, memory: NodeMemory, demand: Sequence[tuple[Slot, int]]) -> None:
    """Give slots larger files; refuse before anything is allocated where the node has no room for them.

    Collective over the world. A slot that holds a committed step is left as it is.

    Args:
        demand: slots of this rank and the bytes each must take.

    Raises:
        MemoryTooSmall: on all ranks, with the numbers of the node that lacks memory.
    """
    todo = [(slot, round_up(nbytes, PAGE_NBYTES)) for slot, nbytes in demand if needs_room(slot, nbytes)]
    board.put(Word.DEMAND_NBYTES, sum(nbytes - slot.view.nbytes for slot, nbytes in todo))
    world.agree([0])  # every rank's demand is on its board
    error: MlflashError | None = None
    asked, left = sum(board.column(Word.DEMAND_NBYTES)), available(memory.path)
    what, least = min(left.items(), key=lambda item: item[1])
    if todo and asked + _HEADROOM_NBYTES > least:
        error = MemoryTooSmall(
            "the slots of this node do not fit into its memory: save less, use fewer ranks per node or a scheme "
            "that needs less memory, or raise the limit named below",
            rank=world.rank,
            node=world.node_name,
            expected=f"{asked + _HEADROOM_NBYTES:,} bytes more for the slots of {world.local_size} ranks",
            found=f"{least:,} bytes: {what}" + _others(memory),
        )
    world.raise_together(error)
    try:
        for slot, nbytes in todo:
            if slot.segment is not None:  # a free slot holds nothing that is still needed
                old = slot.name
                _unmap(slot)
                memory.remove(old)
            reach("room.removed")
            slot.segment = segment.create(memory, nbytes)
            reach("room.created")
    except MlflashError as problem:
        problem.rank, problem.node = world.rank, world.node_name
        error = problem
    # Also where another rank found no room: what was made here stays, and will be used.
    segment.prefault_in_background([slot.segment for slot, _ in todo if slot.segment is not None])
    world.raise_together(error)


def _others(memory: NodeMemory) -> str:
    held = "".join(f"\n    {job}: {nbytes:,} bytes" for job, nbytes in memory.other_jobs().items())
    return (
        f"; other jobs of yours hold slots here (`mlflash clean JOB` frees those of a dead one):{held}" if held else ""
    )


def _unmap(slot: Slot) -> None:
    if slot.segment is not None:
        slot.segment.close()
    slot.segment, slot.header = None, None
    if slot.use is not Use.BUSY:
        slot.use = Use.FREE
