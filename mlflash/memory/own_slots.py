"""A rank's own slots, as its trainer has them: two for its state, two for its share of what several ranks hold alike.

They belong to the courier. A save leases one of each, fills them, and gives them back by its commit, or unused. What
the trainer keeps is a mapping of each file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..errors import MlflashError
from . import shared_memory_segment
from .node_directory import NodeDirectory, file_name
from .shared_memory_segment import Segment
from .slot import Slot, Use, close_others, read_header, remove_file

log = logging.getLogger("mlflash")

_POLL_S = 0.05  # longest wait before it looks for a free slot again


class SlotId(NamedTuple):
    """One of a rank's own slots: one for its state, or one for its share."""

    is_share: bool
    number: int


def with_ids(own: Sequence[Slot], shares: Sequence[Slot]) -> list[tuple[SlotId, Slot]]:
    """A rank's own slots with their ids."""
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
    version: int  # later reports have a larger one


class Leases(Protocol):
    """The courier, of which own slots are leased. No call is collective."""

    def lease(self, number: int, leave: bool, lent: Collection[int]) -> Sequence[SlotFile]:
        """See `SlotPool.lease`; nothing: no slots are free now, or the courier cannot answer."""

    def release(self, number: int, given_up: Collection[int]) -> None:
        """See `SlotPool.end_lease`."""


class OwnSlots:
    """The own slots of a rank, in its trainer.

    Args:
        count: number of slots of each kind; three if checkpoints are drained, because reading one may take long.
    """

    def __init__(self, memory: NodeDirectory, count: int, courier: Leases):
        self._memory, self._courier = memory, courier
        # own, shares: the slots. Use.BUSY: a save of this trainer fills it, or has handed it to the courier
        self.own = [Slot(use=Use.HOLDS) for _ in range(count)]
        self.shares = [Slot(use=Use.HOLDS) for _ in range(count)]
        self._leases: dict[int, object] = {}  # by number: what they are for
        self._versions: dict[SlotId, int] = {}  # of the newest report about each
        self._numbers = itertools.count(1)
        self._epoch = 0  # how many couriers have ended: their leases are void
        # Not a Condition: that takes and releases its lock in Python code, and if a signal handler raises there, the
        # lock stays taken forever. It is reentrant, because a finalizer may run in the middle, on the same thread.
        self._lock = threading.RLock()
        self._freed = threading.Lock()  # released when a slot becomes free; a waiting thread takes it
        self._quarantined: list[Segment] = []  # files into which a device still copies
        self._lent: collections.Counter[int] = collections.Counter()  # how many views this rank has handed out, by file

    def _all(self) -> list[tuple[SlotId, Slot]]:
        return with_ids(self.own, self.shares)

    def mapped(self) -> dict[int, Segment]:
        return {slot.segment.inode: slot.segment for _, slot in self._all() if slot.segment is not None}

    # Filling slots

    def take(self, wait_s: float, taker: object, leave: bool = False) -> tuple[Slot, Slot] | None:
        """Lease a slot and one for a share, for a save; None if none become free in that time.

        Args:
            taker: what they are for. `give_back` finds them by it, also if an exception keeps the caller from noting
                what it took.
            leave: leave files to the views that this rank has given, instead of waiting for the end of these.
        """
        end = time.monotonic() + wait_s
        with contextlib.suppress(OSError, MlflashError):  # the courier tries it, too, and all ranks hear of it
            self._memory.renew()
        while True:
            number, epoch = next(self._numbers), self._epoch
            self._leases[number] = taker
            lent = [inode for inode, views in list(self._lent.items()) if views]
            if files := self._courier.lease(number, leave, lent):
                if (taken := self._begin(number, files, taker, epoch)) is not None:
                    return taken
                self._courier.release(number, ())
            self._leases.pop(number, None)
            if not self._wait(end):
                return None

    def _begin(self, number: int, files: Sequence[SlotFile], taker: object, epoch: int) -> tuple[Slot, Slot] | None:
        """Note what was leased. None: the courier that was asked has ended, so that the lease is void."""
        with self._lock:
            if epoch != self._epoch:
                return None
            self.update(files)
            slots = dict(self._all())
            slot, share = (slots[file.slot] for file in files)
            for leased in (slot, share):
                leased.lease, leased.use = number, Use.BUSY
        return slot, share

    def _wait(self, end: float) -> bool:
        """Wait a little for a slot to become free; return whether there was time for it. Do not hold the lock."""
        remaining_s = end - time.monotonic()
        if remaining_s > 0:
            self._freed.acquire(timeout=min(remaining_s, _POLL_S))
        return remaining_s > 0

    def freed(self) -> None:
        """Note that a slot may be leased again."""
        if self._freed.locked():
            self._freed.release()

    def hand_over(self, slots: Iterable[Slot], taker: object) -> None:
        """Let another save have the lease of some slots."""
        for slot in slots:
            self._leases[slot.lease] = taker

    def give_back(self, taker: object) -> None:
        """Give back what is leased for something, unused, to the courier."""
        for number, stuck in self.ended(taker).items():
            self._courier.release(number, stuck)

    def ended(self, taker: object) -> dict[int, list[int]]:
        """Note that the courier has the slots of a save again, which has ended.

        Return its leases, with the inodes of files that are given up to a device that writes to them.
        """
        numbers = [number for number, leased_for in list(self._leases.items()) if leased_for is taker]
        return {number: self._end(number) for number in numbers}

    def _end(self, number: int) -> list[int]:
        given_up = []
        with self._lock:
            for slot in [slot for _, slot in self._all() if slot.lease == number]:
                if slot.segment is not None and slot.segment.is_written_to:
                    given_up.append(slot.inode)
                    remove_file(self._memory, slot)
                    self._quarantine(slot)
                elif slot.segment is not None:
                    slot.segment.writers.clear()  # all copies are complete; they would keep the state in memory
                slot.lease, slot.use = 0, Use.HOLDS
            self._leases.pop(number, None)
        return given_up

    def _quarantine(self, slot: Slot) -> None:
        """Leave a file to a device that still writes to it."""
        assert slot.segment is not None
        log.warning("a device has not finished its copies into %s: that file is given up", slot.name)
        self._quarantined.append(slot.segment)
        slot.segment = slot.header = None

    def wait_until_ended(self, timeout_s: float, has_failed: Callable[[object], bool]) -> bool:
        """Wait until no slot is being filled, and forget leases of failed saves; return whether that happened in time.

        For a courier that does not know of any lease. ``has_failed``: whether nothing uses a lease any more.
        """
        end = time.monotonic() + timeout_s
        while True:
            self.forget(has_failed)
            with self._lock:
                if not any(slot.lease for _, slot in self._all()):
                    self._epoch += 1
                    self._versions.clear()  # the next courier begins anew
                    return True
            if not self._wait(end):
                return False

    def forget(self, has_failed: Callable[[object], bool]) -> None:
        """Forget the leases of failed saves, of which the courier does not know; nothing fills them any more."""
        failed = [taker for taker in list(self._leases.values()) if has_failed(taker)]
        for taker in failed:
            self.ended(taker)
        if failed:  # or who waits in a loop that begins with this would not wait
            self.freed()

    @property
    def is_device_stuck(self) -> bool:
        """Whether a device has not finished its copies into a slot of an earlier save."""
        with self._lock:
            over = [segment for segment in self._quarantined if not segment.is_written_to]
            self._quarantined = [segment for segment in self._quarantined if segment not in over]
        for segment in over:
            segment.close()
        return bool(self._quarantined)

    def update(self, files: Iterable[SlotFile]) -> None:
        """Map the files that the courier has for the slots now."""
        fresh = []
        with self._lock, contextlib.ExitStack() as closing:  # slots exchange files after a restore; mappings stay
            slots, mappings = dict(self._all()), self.mapped()
            for report in files:
                if report.version < self._versions.get(report.slot, 0):
                    continue  # it was overtaken by the answer to a lease
                self._versions[report.slot], slot = report.version, slots[report.slot]
                if (slot.inode, slot.view.nbytes) != (report.inode, report.nbytes):
                    if slot.segment is not None and slot.segment.is_written_to:
                        self._quarantine(slot)
                    elif slot.segment is not None:
                        closing.callback(slot.segment.close)
                    slot.segment = slot.header = None
                    fresh += self._map(slot, report, mappings)
                slot.header = None if slot.segment is None else read_header(slot.view)
        shared_memory_segment.prefault_in_background(fresh)

    def _map(self, slot: Slot, report: SlotFile, mappings: Mapping[int, Segment]) -> list[Segment]:
        """Map the file of a slot; return the mapping if its pages have to be faulted in."""
        known = mappings.get(report.inode)
        if known is not None and known.nbytes == report.nbytes:
            slot.segment = known.duplicate()
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
            self.freed()

    def unmap_others(self, slots: Iterable[Slot]) -> None:
        close_others(slots, (slot for _, slot in self._all()))

    def open(self, file: int) -> Slot:
        """Map a slot file of this node for reading, until `unmap_others`. Raises CorruptSlot, UnsafePath or OSError."""
        return Slot(shared_memory_segment.attach(self._memory, file_name(file), duplicated=self.mapped()))

    def pin(self) -> None:
        """Page-lock, in the background, the slots that the state is copied into."""
        own = [slot.segment for _, slot in self._all() if slot.segment is not None]
        shared_memory_segment.prefault_in_background(own, pin=True)

    def wait_until_written(self, end: float) -> bool:
        """Wait until nothing copies into any slot any more, or until a time.monotonic; return whether nothing does."""
        segments = [slot.segment for _, slot in self._all() if slot.segment is not None] + self._quarantined
        while any(segment.is_written_to for segment in segments):
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        for _, slot in self._all():
            slot.unmap()
