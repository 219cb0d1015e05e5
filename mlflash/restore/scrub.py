"""Verifies what this rank holds, again and again at a low rate, while its courier has nothing else to do.

Slots, copies, parity and shares are read a run of blocks at a time. When all of memory was verified once since it last
changed, the file that this rank wrote for the newest drained checkpoint is read, too. A separate thread does that, so
that a file system that hangs delays no save. Damage is logged once, and repaired before the next save (see `repair`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..commit.courier_state import CourierState
from ..drain.drain_handle import Drain
from ..errors import MlflashError, text_of
from ..events import Event
from ..memory.slot import Header, Kind, Slot, Use, table_check
from ..mpi.background_collectives import in_thread
from ..mpi.nonblocking import Operation
from .open_in_directory import DrainedFiles

_DRAINED_RUN_NBYTES = 4 << 20  # per read; at least a block
_RUN_NBYTES = 1 << 20  # bytes per read; at least a block
_EVERY_S = 0.5  # time between reads: to begin one costs as much as a few MB
_MOST_S = 0.6  # seconds of reading that may be made up after a job
_ROUND_S = 1.0  # shortest time from round to round, so that a small state is not read all the time
_REPAIRABLE = ("own", "copy", "parity")
_COMES = {
    "own": "The next save repairs it if a copy or parity can",
    "copy": "The next save makes it again",
    "parity": "The next save makes it again",
    "share": "It stays as it is until the next save is committed; a restore takes that share from another node",
    "kept": "It stays as it is; a restore takes its copy or parity",
    "drained": "It stays as it is; a restore takes memory, or an older checkpoint",
}


def why_damaged(drain: Drain, rate: float, over: Event) -> list[tuple[int, str, str]]:
    """Read every block of what this rank has drained, except what HDF5 has compressed.

    Not collective; for a thread that may hang.

    Returns:
        For each file that is damaged or cannot be read: the rank whose state it has, its name, and why.
    """
    assert drain.inside is not None and drain.attempt is not None
    files = DrainedFiles(drain.inside, drain.attempt, drain.step, drain.stored)
    damaged = []
    for rank, stored in drain.stored.items():
        try:
            for entry, place in files.index(rank).pieces:
                if place.packed:  # skipped: HDF5 would hold its lock while a file system hangs
                    continue
                for raw in files.content(rank, entry.name, place, _DRAINED_RUN_NBYTES):
                    if over.wait(raw.nbytes / rate):
                        return []
        except MlflashError as error:
            damaged.append((rank, stored.data, error.message))
        except Exception as error:  # fsspec may raise anything
            damaged.append((rank, stored.data, text_of(error)))
    return damaged


class Scrubber:
    """Verifies what this rank holds. Not collective; for the thread of the courier.

    ``rate``: bytes per second that are read; a drained file is read at the same rate at the same time.
    """

    def __init__(self, context: CourierState, rate: float, newest_drain: Callable[[], Drain | None],
                 clock: Callable[[], float] = time.monotonic):  # fmt: skip
        self._context, self._rate, self._newest_drain, self._clock = context, rate, newest_drain, clock
        self._at = clock()
        self._may_read = 0.0  # bytes that are due
        self._held: list[tuple[Slot, Header]] = []
        self._verifying = self._verify()
        self._is_verified = False  # everything that is held, since it last changed
        self._reported: list[tuple[Slot, Header]] = []  # damaged, and reported
        self._drain: Drain | None = None  # the drain whose file was read, or is being read
        self._reading: Operation | None = None
        self._over = Event()

    def go_on(self, is_wanted: Callable[[], bool]) -> None:
        """Verify a little more, until the courier has something to do."""
        now = self._clock()
        if now - self._at < _EVERY_S:
            return
        self._may_read = min(self._may_read + self._rate * (now - self._at), self._rate * _MOST_S)
        self._at = now
        self._update_held()
        self._verify_drained()
        while self._may_read > 0 and not is_wanted() and (nbytes := next(self._verifying)):
            self._may_read -= nbytes

    def close(self) -> None:
        """Stop reading drained files. Not collective; any thread."""
        self._over.set()

    @property
    def damaged(self) -> list[Slot]:
        """The slots that were found damaged and still hold the same."""
        return [slot for slot, header in self._reported if slot.header is header and slot.use is Use.HOLDS]

    def forget(self, slots: Sequence[Slot]) -> None:
        """Verify slots again that were found damaged, because they were repaired."""
        repaired = {id(slot) for slot in slots}
        self._reported = [(slot, header) for slot, header in self._reported if id(slot) not in repaired]
        self._held = []

    # Memory

    def _update_held(self) -> None:
        """Begin anew if slots hold something else than before: what may be written now is not read."""
        held = [
            (slot, slot.header)
            for slot in self._context.pool.all()
            if slot.use is Use.HOLDS and slot.header is not None
            and slot.is_ready
        ]  # fmt: skip
        if [(id(slot), id(header)) for slot, header in held] != [(id(a), id(b)) for a, b in self._held]:
            self._held, self._verifying, self._is_verified = held, self._verify(), False
            self._reported = [(slot, header) for slot, header in self._reported if slot.header is header]

    def _verify(self) -> Iterator[int]:
        """Verify all that is held, again and again; yield the bytes of each read, and 0 if there is nothing to do."""
        while True:
            start_s = self._clock()
            for slot, header in self._held:
                yield from self._verify_slot(slot, header)
            self._is_verified = True
            while not self._held or self._clock() - start_s < _ROUND_S:
                yield 0

    def _verify_slot(self, slot: Slot, header: Header) -> Iterator[int]:
        extents = header.extents
        if self._is_damaged(slot):
            return
        if slot.stored_header() != header:
            self._say(slot, header, None, "its header is not what it was")
        elif table_check(slot.table(extents)) != header.table_check:
            self._say(slot, header, None, "its block table is damaged")
        yield slot.table(extents).nbytes + 1
        blocks = max(1, _RUN_NBYTES // extents.block_nbytes)
        for first in range(0, extents.blocks, blocks):
            if self._is_damaged(slot):
                return
            last = min(first + blocks, extents.blocks)
            bad = np.flatnonzero(slot.check_blocks(extents, first, last) != slot.table(extents)[first:last])
            if bad.size:
                block = first + int(bad[0])
                how = f"the first damaged one of its {extents.blocks} blocks is number {block}"
                self._say(slot, header, block, how)
            yield (last - first) * extents.block_nbytes

    def _is_damaged(self, slot: Slot) -> bool:
        return any(slot is damaged for damaged in self.damaged)

    def _say(self, slot: Slot, header: Header, block: int | None, how: str) -> None:
        context, kind = self._context, self._kind_of(slot, header)
        self._reported.append((slot, header))
        context.damaged = context.damaged or kind in _REPAIRABLE
        what = {
            "own": "slot",
            "copy": "copy of the slot",
            "parity": "parity",
            "share": "share",
            "kept": "state that is kept on a disk",
        }[kind]
        world = context.world
        text = (
            f"{slot.name} on {world.node_name} is damaged: {how}. It is the {what} of rank {header.rank} at step "
            f"{header.step}, and rank {world.rank} holds it. {_COMES[kind]}"
        )
        context.recorder.damaged(slot.name, kind, header.step, header.rank, block, text)

    def _kind_of(self, slot: Slot, header: Header) -> str:
        if slot in (*self._context.pool.kept, *self._context.pool.kept_shares):
            return "kept"
        if header.kind is Kind.SLOT:
            return "own" if any(slot is own for own in self._context.pool.own) else "copy"
        return "parity" if header.kind is Kind.PARITY else "share"

    # The directory

    def _verify_drained(self) -> None:
        """Begin to read the drained file of this rank if memory is verified, or take the result of that."""
        drain = self._newest_drain()
        if self._reading is None:
            is_there = drain is not None and drain is not self._drain and drain.done and drain.error is None
            if not is_there or not self._is_verified or drain is None:
                return
            self._drain = drain
            self._reading = in_thread(lambda: why_damaged(drain, self._rate, self._over), "mlflash-scrub")
        try:
            next(self._reading)
        except StopIteration as end:
            self._reading = None
            for rank, file, why in end.value:
                self._say_of_file(rank, file, why)
        except Exception as error:  # from any library that reads files
            self._reading = None
            self._say_of_file(self._context.world.rank, "", str(error))

    def _say_of_file(self, rank: int, file: str, why: str) -> None:
        assert self._drain is not None
        step, path = self._drain.step, f"{self._drain.path}/{file}".rstrip("/")
        text = f"{path} is damaged: {why}. It is the drained state of rank {rank} at step {step}. {_COMES['drained']}"
        self._context.recorder.damaged(path, "drained", step, rank, None, text)
