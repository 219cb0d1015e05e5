"""A slot from one rank to another, in chunks, with checksums at both ends.

There are two transports: ``p2p`` (Isend/Irecv into the mapped slot) and ``rma`` (Rput into the receiver's window). The
sender makes the checksums of a chunk while the previous chunk is being sent. The receiver checks a chunk while the next
one arrives, then checks table and header, seals its slot, and acknowledges. Both sides are operations for
`World.drive`, so that one thread runs any number of them at the same time.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.copy_threads import ALONE, CopyThreads
from ..memory.slot import (
    HEADER_NBYTES,
    Attempt,
    Header,
    Incoming,
    Kind,
    Slot,
    Use,
    checks_of,
    table_check,
    unpack,
)
from ..mpi.fabric import OpenMemory
from ..mpi.nonblocking import AT_ONCE, Operation, SendRate, done
from ..mpi.world import World
from ..state.layout import PAGE_NBYTES, Extents

_OFFER, _READY, _BODY, _CHECKS, _HEADER, _ACK = range(11, 17)
CHUNK_BLOCKS = 4
"""Blocks per transfer: fewer than 4 MiB cost each message its latency, and more would delay the check at the other end.

Open MPI 5 refuses a count above 2^31-1.
"""
_DEPTH = 4  # chunks in flight
_EXAMINED_NBYTES = 1 << 20  # checked at a time, so that values are examined while they are in the cache
ARRIVAL_S = 30.0  # how long after its notice a Put chunk may take to become visible


class Source:
    """A slot that is sent; if it is not sealed yet, the checksums that it lacks are made during the transfer.

    Args:
        seal: called with the checksum of the finished table; makes the header, or returns None if the slot must stay
            unsealed (then the receiver refuses it, too). None for a slot that is sealed already.
        examine: told up to which block there are checksums: bytes that were just read are cheap to check.
    """

    def __init__(
        self, slot: Slot, extents: Extents, seal: Callable[[int], Header | None] | None, pace: SendRate = AT_ONCE,
        examine: Callable[[int], None] = lambda block: None, copy_threads: CopyThreads = ALONE,
    ):  # fmt: skip
        self.slot, self.extents, self.pace, self._examine = slot, extents, pace, examine
        self._copy_threads = copy_threads
        self._seal = seal
        self._checked = 0 if seal is not None else extents.blocks

    def check_up_to(self, block: int) -> None:
        """Make the checksums of all blocks below ``block`` that have none yet."""
        if block > self._checked:
            table = self.slot.table(self.extents)
            missing = np.arange(self._checked, block)
            if self.slot.is_begun:
                missing = missing[table[self._checked : block] == 0]
            step = max(1, _EXAMINED_NBYTES // self.extents.block_nbytes) * self._copy_threads.threads
            for number in range(0, len(missing), step):
                some = missing[number : number + step].tolist()
                self._copy_threads.run([functools.partial(self._check, one) for one in some])
                self._examine(some[-1] + 1)
            self._examine(block)
            self._checked = block

    def _check(self, block: int) -> None:
        checks = self.slot.check_blocks(self.extents, block, block + 1)
        self.slot.table(self.extents)[block : block + 1] = checks

    def seal(self) -> None:
        """Finish the table and seal the slot; does nothing if that is done."""
        self.check_up_to(self.extents.blocks)
        if self._seal is not None:
            header = self._seal(table_check(self.slot.table(self.extents)))
            if header is not None:
                self.slot.seal(header)
            self._seal = None


def chunks(extents: Extents) -> list[tuple[int, int]]:
    """Cut a body into runs of whole blocks, ``(first, last + 1)``, one for each transfer."""
    return [(i, min(i + CHUNK_BLOCKS, extents.blocks)) for i in range(0, extents.blocks, CHUNK_BLOCKS)]


def swap(world: World, to: Mapping[int, Sequence[int]], receive_from: Sequence[int]) -> dict[int, list[int]]:
    """Send three numbers to some ranks and receive three from others; both sides must name each other."""
    if world.world is None:
        return {}
    arrived = {peer: np.empty(3, dtype=np.int64) for peer in receive_from}
    requests = [world.data.Irecv(numbers, peer, _OFFER) for peer, numbers in arrived.items()]
    requests += [world.data.Isend(np.array(numbers, dtype=np.int64), peer, _OFFER) for peer, numbers in to.items()]
    world.waiting_for = sorted({*to, *receive_from})
    world.finish(*requests)
    world.waiting_for = ()
    return {peer: numbers.tolist() for peer, numbers in arrived.items()}


def offer(world: World, to: Mapping[int, Extents | None], receive_from: Sequence[int]) -> dict[int, Extents | None]:
    """Tell the receivers what will be sent to them, and learn what will be sent to this rank (None: nothing)."""
    numbers = {
        peer: (-1, -1, -1) if e is None else (e.manifest_room, e.payload_nbytes, e.block_nbytes)
        for peer, e in to.items()
    }
    arrived = swap(world, numbers, receive_from)
    return {peer: None if n[0] < 0 else Extents(*n) for peer, n in arrived.items()}


def send(world: World, peer: int, source: Source, window: Callable[[int], tuple[OpenMemory, int]] | None = None
         ) -> Operation:  # fmt: skip
    """Send a slot; the operation's result is whether the peer has it intact.

    Args:
        window: for the transport rma: gives, for the number that the receiver names, its window and target rank; None
            for p2p.
    """
    mpi, comm, slot, extents = world.mpi, world.data, source.slot, source.extents
    body, table = slot.body(extents), slot.table(extents)
    target = None
    if window is not None:
        number = np.empty(1, dtype=np.int64)
        yield from done(comm.Irecv(number, peer, _READY))
        target = window(int(number[0]))
    sent: deque[Any] = deque()
    runs = chunks(extents)
    for (first, last), (_, coming) in zip(runs, runs[1:] + runs[-1:], strict=True):
        source.check_up_to(last)
        raw = body[first * extents.block_nbytes : min(last * extents.block_nbytes, body.nbytes)]
        checks = [table[first:last], mpi.BYTE]
        yield from source.pace.send(raw.nbytes)
        if target is None:
            sent.append(comm.Isend([raw, mpi.BYTE], peer, _BODY))
            sent.append(comm.Isend(checks, peer, _CHECKS))
        else:
            put = target[0].put(raw, target[1], PAGE_NBYTES + first * extents.block_nbytes)
            source.check_up_to(coming)  # while the Put is on its way
            yield from done(put)
            sent.append(comm.Isend(checks, peer, _CHECKS))
        reach("transfer.sent")
        yield True
        while len(sent) > 2 * _DEPTH:
            yield from done(sent.popleft())
    source.seal()
    page = slot.view[:HEADER_NBYTES].copy()
    sent.append(comm.Isend([page, mpi.BYTE], peer, _HEADER))
    answer = np.empty(1, dtype=np.int64)
    sent.append(comm.Irecv(answer, peer, _ACK))
    while sent:
        yield from done(sent.popleft())
    if target is not None:
        target[0].flush(target[1])  # after the acknowledgement, so that it does not wait
    return bool(answer[0])


def receive(world: World, peer: int, slot: Slot, extents: Extents, is_wanted: Callable[[Header], bool],
            window: tuple[int, OpenMemory] | None = None) -> Operation:  # fmt: skip
    """Receive a slot; the operation's result is whether it arrived intact (then it is sealed).

    Args:
        slot: where it goes; large enough for ``extents``.
        window: for the transport rma: the window that exposes ``slot``, and the number that identifies it to the
            sender; None for p2p.
    """
    mpi, comm = world.mpi, world.data
    while not slot.is_ready:
        yield False
    slot.unseal()
    incoming = slot.incoming(extents)
    try:
        good = yield from _receive(world, peer, incoming, extents, window)
    finally:
        incoming.end()
    while incoming.is_good is None:
        yield False
    page = np.empty(HEADER_NBYTES, dtype=np.uint8)
    yield from done(comm.Irecv([page, mpi.BYTE], peer, _HEADER))
    reach("transfer.received")
    good = good and bool(incoming.is_good) and _accept(slot, incoming.table, extents, page, is_wanted)
    reach("transfer.sealed")
    yield from done(comm.Isend(np.array([int(good)], dtype=np.int64), peer, _ACK))
    return good


def _receive(world: World, peer: int, incoming: Incoming, extents: Extents, window: tuple[int, OpenMemory] | None
             ) -> Operation:  # fmt: skip
    """Receive body and table; the operation's result is whether both match."""
    mpi, comm, table = world.mpi, world.data, incoming.table
    runs = chunks(extents)
    if window is not None:
        yield from done(comm.Isend(np.array([window[0]], dtype=np.int64), peer, _READY))
    posted: deque[tuple[Any, ...]] = deque()
    following = deque(runs)
    good = True
    for first, last in runs:
        while len(posted) < _DEPTH and following:
            if (into := incoming.place(*following[0])) is None:
                if posted:
                    break
                yield False
                continue
            run = following.popleft()
            checks = comm.Irecv([table[run[0] : run[1]], mpi.BYTE], peer, _CHECKS)
            posted.append((checks,) if window else (comm.Irecv([into, mpi.BYTE], peer, _BODY), checks))
        for request in posted.popleft():
            yield from done(request)
        good &= yield from _arrived(incoming, extents, first, last, window[1] if window else None)
        incoming.keep(first, last)
        reach("transfer.arrived")
        yield True
    return good


def slot_of(owner: int, attempt: Attempt) -> Callable[[Header], bool]:
    """Return a function that says whether a header belongs to a rank's slot of an attempt."""
    return lambda header: (header.kind, header.rank, header.attempt) == (Kind.SLOT, owner, attempt)


def _arrived(incoming: Incoming, extents: Extents, first: int, last: int, window: OpenMemory | None) -> Operation:
    """Check a run of blocks; bytes that were Put may become visible a little after their notice."""
    end = time.monotonic() + ARRIVAL_S
    while True:
        if window is not None:
            window.sync()
        if np.array_equal(checks_of(incoming.run(first, last), extents.block_nbytes), incoming.table[first:last]):
            return True
        if window is None or time.monotonic() > end:
            return False
        yield False


def _accept(slot: Slot, table: np.ndarray, extents: Extents, page: np.ndarray, is_wanted: Callable[[Header], bool]
            ) -> bool:  # fmt: skip
    try:
        header = unpack(page.tobytes())
    except CorruptSlot:
        return False
    if header.extents != extents or not is_wanted(header):
        return False
    if table_check(table) != header.table_check:
        return False
    slot.seal(header)
    slot.use = Use.BUSY
    return slot.header is header
