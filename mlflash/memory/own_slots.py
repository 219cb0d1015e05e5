"""A rank's own slots, as its trainer has them: two for its state, two for its share of what several ranks hold alike.

Each of them belongs either to the trainer, which may fill it, or to the courier, and never to both. A save hands the
slots that it has filled to the courier. The courier gives back those that may be filled again, and asks for free ones
if it has to replace their files.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import MlflashError
from . import shared_memory_segment
from .inventory import file_name
from .node_directory import NodeDirectory
from .shared_memory_segment import Segment
from .slot import Slot, Use, close_others, leave_behind, oldest_free, read_header

log = logging.getLogger("mlflash")

_LOOK_S = 0.05  # longest wait before it looks for a free slot again


class SlotId(NamedTuple):
    """One of a rank's own slots: one for its state, or one for its share."""

    is_share: bool
    number: int


def named(own: Sequence[Slot], shares: Sequence[Slot]) -> list[tuple[SlotId, Slot]]:
    """Name a rank's own slots."""
    kinds = ((False, own), (True, shares))
    return [(SlotId(kind, number), slot) for kind, slots in kinds for number, slot in enumerate(slots)]


@dataclasses.dataclass(frozen=True)
class SlotFile:
    """What the courier reports about an own slot."""

    slot: SlotId
    file: int | None  # number of its file; None: it has none yet
    # inode, nbytes: of that file, which may have become larger; 0: none
    inode: int
    nbytes: int
    is_free: bool  # whether it belongs to the trainer from now on


class OwnSlots:
    """The own slots of a rank, in its trainer.

    Args:
        count: number of slots of each kind; three if checkpoints are drained, because reading one may take long.
    """

    def __init__(self, memory: NodeDirectory, count: int):
        self._memory = memory
        # own, shares: the slots. Use.FREE: the trainer may fill it. Use.BUSY: it is being filled, or saved. Use.HOLDS:
        # it belongs to the courier
        self.own = [Slot(use=Use.HOLDS) for _ in range(count)]
        self.shares = [Slot(use=Use.HOLDS) for _ in range(count)]
        # Not a Condition: that takes and releases its lock in Python code, and if a signal handler raises there, the
        # lock stays taken forever. It is reentrant, because a finalizer may run in the middle, on the same thread.
        self._lock = threading.RLock()
        self._freed = threading.Lock()  # released when a slot becomes free; a waiting thread takes it
        self._quarantined: list[Segment] = []  # files into which a device still copies
        self._lent: collections.Counter[int] = collections.Counter()  # how many views this rank has handed out, by file

    def _all(self) -> list[tuple[SlotId, Slot]]:
        return named(self.own, self.shares)

    def ids_of(self, slots: Iterable[Slot]) -> list[SlotId]:
        wanted = {id(slot) for slot in slots}
        return [name for name, slot in self._all() if id(slot) in wanted]

    def mapped(self) -> dict[int, Segment]:
        return {slot.segment.inode: slot.segment for _, slot in self._all() if slot.segment is not None}

    # Filling slots

    def take(self, wait_s: float, taker: object, leave: bool = False) -> tuple[Slot, Slot] | None:
        """Take a slot and one for a share, for a save; None if none become free in that time.

        Args:
            taker: what they are taken for. `taken_by` finds them again if an exception keeps the caller from noting
                what it took.
            leave: leave files to the views that this rank has given, instead of waiting for the end of these.
        """
        end = time.monotonic() + wait_s
        with contextlib.suppress(OSError, MlflashError):  # the courier tries it, too, and all ranks hear of it
            self._memory.renew()
        while True:
            with self._lock:
                for _, slot in self._all():
                    if slot.use is Use.FREE and slot.is_gone:
                        slot.unmap()
                pair = self._free_pair(leave)
                for slot in pair or ():
                    slot.taker = taker
                    slot.use = Use.BUSY
            if pair is not None or not self._wait(end):
                return pair

    def _wait(self, end: float) -> bool:
        """Wait a little for a slot to become free; return whether there was time for it. Do not hold the lock."""
        left = end - time.monotonic()
        if left > 0:
            self._freed.acquire(timeout=min(left, _LOOK_S))
        return left > 0

    def _tell_freed(self) -> None:
        if self._freed.locked():
            self._freed.release()

    def taken_by(self, taker: object) -> list[Slot]:
        return [slot for _, slot in self._all() if slot.taker is taker and slot.use is Use.BUSY]

    def hand_over(self, slots: Iterable[Slot], taker: object) -> None:
        for slot in slots:
            slot.taker = taker

    def give_back(self, taken: Iterable[Slot]) -> None:
        with self._lock:
            for slot in taken:
                self._free(slot)
            self._tell_freed()

    def committed(self, taker: object) -> None:
        """Leave the slots of a save to the courier: they now hold a checkpoint."""
        with self._lock:
            for slot in self.taken_by(taker):
                slot.taker, slot.use = None, Use.HOLDS
                if slot.segment is not None:
                    slot.segment.writers.clear()  # all copies are complete; the writers would keep the state in memory

    def reclaim(self, has_failed: Callable[[object], bool]) -> None:
        """Leave the slots of failed saves to a courier that does not know about them; nothing fills them any more."""
        with self._lock:
            failed = [slot for _, slot in self._all() if slot.use is Use.BUSY and has_failed(slot.taker)]
            for slot in failed:
                self._free(slot)
                slot.use = Use.HOLDS
            if failed:  # or who waits in a loop that begins with this would not wait
                self._tell_freed()

    def wait_until_given(self, timeout_s: float, has_failed: Callable[[object], bool]) -> bool:
        """Leave all slots to the courier, and wait until none is being filled; return whether that happened in time."""
        end = time.monotonic() + timeout_s
        while True:
            self.prepare([(name, 0) for name, _ in self._all()])
            self.reclaim(has_failed)
            if all(slot.use is Use.HOLDS for _, slot in self._all()):
                return True
            if not self._wait(end):
                return False

    def _free_pair(self, leave: bool) -> tuple[Slot, Slot] | None:
        own, share = (self._free_slot(slots, leave) for slots in (self.own, self.shares))
        return None if own is None or share is None else (own, share)

    def _free_slot(self, slots: Sequence[Slot], leave: bool) -> Slot | None:
        """A slot that may be filled; a file with views is left to them, if they are this rank's only with ``leave``."""
        may_leave: Callable[[Segment], bool] = lambda segment: leave or not self._lent[segment.inode]
        return oldest_free(slots) or leave_behind(self._memory, slots, may_leave)

    def _free(self, slot: Slot) -> None:
        """Let saves fill a slot again; a file that a device still copies into is left to the device."""
        stuck = slot.segment
        if stuck is not None and stuck.is_written_to:
            log.warning("a device has not finished its copies into %s: that file is given up", stuck.name)
            self._quarantined.append(stuck)
            self._memory.remove(stuck.name)
            slot.segment, slot.header = None, None
        slot.taker, slot.use = None, Use.FREE

    @property
    def is_device_stuck(self) -> bool:
        """Whether a device has not finished its copies into a slot of an earlier save."""
        with self._lock:
            over = [one for one in self._quarantined if not one.is_written_to]
            self._quarantined = [one for one in self._quarantined if one not in over]
        for one in over:
            one.close()
        return bool(self._quarantined)

    # Requests and news from the courier

    def prepare(self, wanted: Sequence[tuple[SlotId, int]], waiting: Sequence[SlotId] = ()) -> list[SlotId]:
        """Leave free slots to the courier, which may replace their files; files that are too small are unmapped.

        Args:
            wanted: slots, and the bytes that each must hold; 0: it needs no larger file.
            waiting: slots that are busy with a save which waits for their files.

        Returns:
            Those of the other slots that were free; they now belong to the courier.
        """
        given = []
        with self._lock:
            slots = dict(self._all())
            for name, nbytes in wanted:
                slot = slots[name]
                if slot.use is Use.FREE:
                    slot.use = Use.HOLDS
                    given.append(name)
                elif name not in waiting:
                    continue
                if slot.view.nbytes < nbytes:
                    slot.unmap()
        return given

    def update(self, files: Iterable[SlotFile]) -> None:
        """Note which files the slots have, and which of them may be filled from now on."""
        fresh = []
        with self._lock, contextlib.ExitStack() as left:  # slots exchange files after a restore; mappings stay
            slots, had = dict(self._all()), self.mapped()
            for report in files:
                slot = slots[report.slot]
                if (slot.inode, slot.view.nbytes) != (report.inode, report.nbytes):
                    if slot.segment is not None:
                        left.callback(slot.segment.close)
                    slot.segment = slot.header = None
                    fresh += self._map(slot, report, had)
                slot.header = None if slot.segment is None else read_header(slot.view)
                if report.is_free:
                    self._free(slot)
            self._tell_freed()
        shared_memory_segment.prefault_in_background(fresh)

    def _map(self, slot: Slot, report: SlotFile, mappings: Mapping[int, Segment]) -> list[Segment]:
        """Map the file of a slot; return the mapping if its pages have to be faulted in."""
        known = mappings.get(report.inode)
        if known is not None and known.nbytes == report.nbytes:
            slot.segment = known.again()
            return []
        if report.file is None:
            return []
        try:
            slot.segment = shared_memory_segment.attach(self._memory, file_name(report.file))
        except (MlflashError, OSError) as error:  # the next save gets another file for it
            log.warning("%s is passed over: %s", file_name(report.file), error)
            return []
        return [slot.segment]

    # Reading slots

    def holding(self, number: int) -> Slot:
        slot = self.own[number]
        slot.header = read_header(slot.view)
        return slot

    def lend(self, slot: Slot) -> Slot:
        """Return a slot for reading as long as it has views: no save gets it, and writes to these stay here."""
        mapped, take_back = shared_memory_segment.lend(self._memory, slot.name)
        self._lent[mapped.inode] += 1
        weakref.finalize(mapped.view, self._returned, mapped.inode, take_back).atexit = False
        return Slot(mapped)

    def _returned(self, inode: int, take_back: Callable[[], None]) -> None:
        take_back()
        with self._lock:
            self._lent[inode] -= 1
            self._tell_freed()

    def unmap_others(self, slots: Iterable[Slot]) -> None:
        close_others(slots, (slot for _, slot in self._all()))

    def open(self, file: int) -> Slot:
        """Map a slot file of this node for reading, until `unmap_others`. Raises CorruptSlot, UnsafePath or OSError."""
        return Slot(shared_memory_segment.attach(self._memory, file_name(file), again=self.mapped()))

    def pin(self) -> None:
        """Page-lock, in the background, the slots that the state is copied into."""
        own = [slot.segment for _, slot in self._all() if slot.segment is not None]
        shared_memory_segment.prefault_in_background(own, pin=True)

    def wait_until_written(self, end: float) -> bool:
        """Wait until nothing copies into any slot any more, or until a time.monotonic; return whether nothing does."""
        segments = [slot.segment for _, slot in self._all() if slot.segment is not None] + self._quarantined
        while any(one.is_written_to for one in segments):
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        for _, slot in self._all():
            slot.unmap()
