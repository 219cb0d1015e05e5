"""The slots of this rank: two of its own, two for each rank whose copies it holds, two for its part of parity.

Where it shares state with others, two more for its share.

Two of each, because the last committed one is never written: a save goes into the other one. Where checkpoints are
drained there is a third own one, as one may be read for long.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from ..errors import CorruptSlot
from . import shared_memory_segment
from .file_assignment import AssignedFiles
from .inventory import file_name, file_number
from .node_directory import NodeDirectory
from .slot import Slot, Use
from .slot_header import Attempt

log = logging.getLogger("mlflash")


class SlotPool:
    """This rank's slots.

    Args:
        memory: this node's directory.
        owners: the ranks whose copies this rank holds, and itself where it holds parity.
        own: slots of its own; three where checkpoints are drained, as one of them may be read for long.
    """

    def __init__(self, memory: NodeDirectory, owners: Sequence[int], own: int = 2):
        self._memory = memory
        self.own = [Slot() for _ in range(own)]
        self.shares = [Slot() for _ in range(own)]  # without files where nothing is shared
        self.inbox = {owner: [Slot(), Slot()] for owner in owners}
        self._distrusted: list[Slot] = []
        self._spare: set[int] = set()  # files to delete once nothing can need them
        self._kept: set[int] = set()  # files to delete once a newer step is committed
        self._stale: set[int] = set()  # those among them that do not hold the attempt restored
        self._quarantined: list[shared_memory_segment.Segment] = []  # files that a device has not ended its copies into
        self.aside: set[int] = set()  # files of this node that are left to themselves until a newer step is committed
        self.changed = threading.Condition()  # notified when a slot becomes free
        self._lent: collections.Counter[int] = collections.Counter()  # how many views this rank has given, by inode

    def all(self) -> list[Slot]:
        """All slots, own ones first."""
        return [*self.own, *self.shares, *(slot for pair in self.inbox.values() for slot in pair)]

    @property
    def nbytes(self) -> int:
        """Bytes of the node's memory that the files of this rank take."""
        return sum(slot.segment.nbytes for slot in self.all() if slot.segment is not None)

    def adopt(self, files: AssignedFiles, kept: Attempt | None, trusted: Container[int], spare: Sequence[int],
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
        shared_memory_segment.prefault_in_background([s.segment for s in self.all() if s.segment is not None])

    def mapped(self) -> dict[int, shared_memory_segment.Segment]:
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

    def _attach(self, number: int | None, mapped: dict[int, shared_memory_segment.Segment]) -> Slot:
        if number is None:
            return Slot()
        try:
            return Slot(shared_memory_segment.attach(self._memory, file_name(number), mapped))
        except (CorruptSlot, FileNotFoundError):
            self._memory.remove(file_name(number))
        except OSError as error:  # not ours, or of no use to us: neither may stop this rank alone
            log.warning("%s is passed over: %s", file_name(number), error)
        return Slot()

    def take(self, wait_s: float, taker: object, leave: bool = False) -> tuple[Slot, Slot] | None:
        """Take an own slot and one for a share, for a save; None where both hold something or are busy for so long.

        Not collective.

        Args:
            wait_s: how long to wait for them, seconds.
            taker: what they are taken for. `taken_by` finds them again, should an exception keep the caller from
                ever noting what it took.
            leave: rather leave files to the views that this rank has given than wait for the end of these.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._free_pair(leave) is not None, wait_s)
            pair = self._free_pair(leave)
            for slot in pair or ():
                slot.taker = taker
                slot.use = Use.BUSY
            return pair

    def taken_by(self, taker: object) -> list[Slot]:
        """The slots that are busy with something. Not collective."""
        return [slot for slot in (*self.own, *self.shares) if slot.taker is taker and slot.use is Use.BUSY]

    def numbers_of(self, slot: Slot, share: Slot) -> tuple[int, int]:
        """The numbers of an own slot and of one for a share, by which the courier knows them. Not collective."""
        own, shares = ([id(one) for one in slots] for slots in (self.own, self.shares))
        return own.index(id(slot)), shares.index(id(share))

    def hand_over(self, slots: Iterable[Slot], taker: object) -> None:
        """Let slots that were taken be busy with something else. Not collective."""
        for slot in slots:
            slot.taker = taker

    @property
    def is_device_stuck(self) -> bool:
        """Whether a device has not ended its copies into a slot of an earlier save. Not collective."""
        with self.changed:
            over = [one for one in self._quarantined if not one.is_written_to]
            self._quarantined = [one for one in self._quarantined if one not in over]
        for one in over:
            one.close()
        return bool(self._quarantined)

    def give_back(self, taken: Iterable[Slot]) -> None:
        """Free slots that were taken for a save that does not come. Not collective."""
        with self.changed:
            for slot in taken:
                self._free(slot)
            self.changed.notify_all()

    def _free(self, slot: Slot) -> None:
        """Let saves write a slot again. What a device is still copying into stays the device's: the slot gets another
        file with the next save.
        """
        stuck = slot.segment
        if stuck is not None and stuck.is_written_to:
            log.warning("a device has not ended its copies into %s: that file is given up", stuck.name)
            self._quarantined.append(stuck)
            self._memory.remove(stuck.name)
            slot.segment, slot.header = None, None
        slot.taker = None
        slot.use = Use.FREE

    def _free_pair(self, leave: bool) -> tuple[Slot, Slot] | None:
        own, share = (self.free_slot(pair, leave) for pair in (self.own, self.shares))
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
        mapped, take_back = shared_memory_segment.lend(self._memory, slot.name)
        self._lent[mapped.inode] += 1
        weakref.finalize(mapped.view, self._returned, mapped.inode, take_back).atexit = False
        return Slot(mapped)

    def _returned(self, inode: int, take_back: Callable[[], None]) -> None:
        take_back()
        with self.changed:
            self._lent[inode] -= 1
            self.changed.notify_all()

    def _leave_behind(self, pair: Sequence[Slot], ours: bool) -> Slot | None:
        """Leave the file of a slot to those who have views of it; the slot is free, and gets another one.

        Args:
            pair: of which one may be written, were it not lent.
            ours: also a file that this rank itself has lent.
        """
        for slot in pair:
            if slot.use is not Use.FREE or slot.drains or slot.segment is None:
                continue
            if ours or not self._lent[slot.segment.inode]:
                self._memory.remove(slot.name)
                unmap(slot)
                return slot
        return None

    def free_slot(self, pair: Sequence[Slot], leave: bool = True) -> Slot | None:
        """A slot of a pair that may be written; the one with the older content first.

        Where there is none but for views of its file, that is left to them: those of others in any case, as nobody here
        knows when they end, and with ``leave`` those that this rank has given.
        """
        free = [slot for slot in pair if slot.is_free]
        return min(free, key=lambda slot: slot.generation, default=None) or self._leave_behind(pair, leave)

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
                if slot.use is Use.BUSY and committed:
                    slot.taker, slot.use = None, Use.HOLDS
                    if slot.segment is not None:
                        slot.segment.writers.clear()  # all is there; they hold the state that was copied
                elif slot.use is Use.BUSY:
                    self._free(slot)
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
        shared_memory_segment.prefault_in_background(own, pin=True)

    def close(self) -> None:
        """Unmap everything; the files stay."""
        for slot in self.all():
            unmap(slot)


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


def unmap(slot: Slot) -> None:
    """Unmap the file of a slot, which stays. Not collective."""
    if slot.segment is not None:
        slot.segment.close()
    slot.segment, slot.header = None, None
    if slot.use is not Use.BUSY:
        slot.use = Use.FREE
