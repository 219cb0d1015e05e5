"""Blocks from several ranks to one, coded there, and the results to where they belong: encoding and rebuilding.

All ranks of a group know the same list of tasks. In the order of the list, each sends the inputs that it holds, codes
its own tasks, and receives the outputs that belong to it. A few tasks are in progress at a time, in buffers of one
block per unit. The rank that codes blocks makes a checksum of each, which is compared with the table of its slot; coded
blocks travel with their checksums.

Blocks always travel by messages (Isend/Irecv). A Put into a buffer that is used again cannot be told from what the
buffer held before: if both are equal, such as zeros, the receiver takes the block for arrived, uses the buffer for
another block, and the Put then overwrites that one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
import xxhash

from ..crash_points import reach
from ..memory.parity_layout import Task, Unit
from ..memory.slot import MAX_GROUP
from ..mpi.nonblocking import Operation, SendRate, done, side_by_side
from ..mpi.world import World
from . import erasure_codes

_BODY, _CHECK = 0, 1
_FIRST_TAG, _TAGGED = 100, 64  # tasks end in any order: a tag tells the task, modulo this, and the unit
_DEPTH = 3  # tasks in progress at a time


class Blocks(Protocol):
    """The blocks that the tasks are about, and the ranks that have them.

    Attributes:
        compares: whether `took` is told the checksums of inputs; otherwise it is known beforehand what is coded.
        pace: how fast they are sent.
    """

    compares: bool
    pace: SendRate

    def rank_of(self, unit: Unit) -> int:
        """The rank that reads or writes a block."""

    def nbytes(self, unit: Unit) -> int:
        """Bytes of a block, on any rank; the last block of a slot may be short."""

    def read(self, unit: Unit) -> tuple[np.ndarray, int]:
        """Bytes and checksum of a block that this rank holds."""

    def place(self, unit: Unit) -> np.ndarray:
        """Where the bytes of an output of this rank go."""

    def placed(self, unit: Unit, check: int) -> bool:
        """Note that an output is in place; return whether it is what it must be."""

    def took(self, unit: Unit, check: int) -> None:
        """Note the checksum of a block that was coded here, so that it can be compared with its slot's table."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """What one rank does for a list of tasks."""

    sends: list[tuple[int, int, Unit]]  # blocks that it sends: receiver, message tag, block
    codes: list[tuple[int, Task]]  # tasks that it codes, by number
    takes: list[tuple[int, int, Unit]]  # blocks that it receives: sender, message tag, block


def roles_of(rank: int, tasks: Iterable[Task], rank_of: Callable[[Unit], int]) -> Roles:
    """Select what one rank has to do from the tasks, which are the same on all ranks."""
    roles = Roles([], [], [])
    for number, task in enumerate(tasks):
        coder = rank_of(task.coder)
        if coder == rank:
            roles.codes.append((number, task))
            continue
        for nth, unit in zip(task.have, task.inputs, strict=True):
            if unit is not None and rank_of(unit) == rank:
                roles.sends.append((coder, _tag(number, nth), unit))
        for nth, unit in zip(task.want, task.outputs, strict=True):
            if rank_of(unit) == rank:
                roles.takes.append((coder, _tag(number, nth), unit))
    return roles


class ParityExchange:
    """Buffers of the blocks that are coded here, for the ``units`` of a stripe, data and parity."""

    def __init__(self, world: World, block_nbytes: int, units: int):
        self.block_nbytes = block_nbytes
        self._world = world
        self._lanes: np.ndarray = np.empty((_DEPTH * units, block_nbytes), dtype=np.uint8)
        self._free = list(range(len(self._lanes)))

    def moves(self, roles: Roles, blocks: Blocks) -> list[Operation]:
        """This rank's part in some tasks, as operations whose result is whether every block was whole."""
        sends = (self._send_block(coder, tag, unit, blocks) for coder, tag, unit in roles.sends)
        codes = (self._code(number, task, blocks) for number, task in roles.codes)
        takes = (self._take(coder, tag, unit, blocks) for coder, tag, unit in roles.takes)
        return [in_order(sends, 2 * _DEPTH), in_order(codes, _DEPTH), in_order(takes, _DEPTH)]

    def _send_block(self, coder: int, tag: int, unit: Unit, blocks: Blocks) -> Operation:
        yield from blocks.pace.send(blocks.nbytes(unit))
        raw, _ = blocks.read(unit)
        yield from self._send(coder, tag, raw, None)
        return True

    def _take(self, coder: int, tag: int, unit: Unit, blocks: Blocks) -> Operation:
        good, check = yield from self._receive(coder, tag, blocks.place(unit), is_told=True)
        reach("parity.arrived")
        return good and blocks.placed(unit, check)

    def _code(self, number: int, task: Task, blocks: Blocks) -> Operation:
        me = self._world.rank
        lanes = [self._free.pop() for _ in (*task.inputs, *task.outputs)]
        sources: list[np.ndarray | None] = []
        arriving: list[Operation] = []
        for nth, unit, lane in zip(task.have, task.inputs, lanes, strict=False):
            if unit is None:
                sources.append(None)
                continue
            buffer, nbytes, holder = self._lanes[lane], blocks.nbytes(unit), blocks.rank_of(unit)
            if holder == me:
                raw, check = blocks.read(unit)
                blocks.took(unit, check)
                if nbytes < self.block_nbytes:
                    buffer[:nbytes] = raw
                else:
                    buffer = raw
            else:
                arriving.append(self._input(holder, _tag(number, nth), unit, lane, blocks))
            self._lanes[lane][nbytes:] = 0
            sources.append(buffer)
        good = all((yield from side_by_side(arriving)))
        reach("parity.gathered")
        made = []
        for unit, lane in zip(task.outputs, lanes[len(task.inputs) :], strict=True):
            here = blocks.rank_of(unit) == me and blocks.nbytes(unit) == self.block_nbytes
            made.append(blocks.place(unit) if here else self._lanes[lane])
        erasure_codes.combine(erasure_codes.matrix(len(task.inputs), task.have, task.want), sources, made)
        reach("parity.coded")
        yield True
        for nth, unit, coded in zip(task.want, task.outputs, made, strict=True):
            raw = coded[: blocks.nbytes(unit)]
            check = xxhash.xxh3_64_intdigest(raw.data)
            if (taker := blocks.rank_of(unit)) != me:
                yield from blocks.pace.send(raw.nbytes)
                yield from self._send(taker, _tag(number, nth), raw, check)
                continue
            into = blocks.place(unit)
            if into.nbytes < self.block_nbytes:
                np.copyto(into, raw)
            good &= blocks.placed(unit, check)
        self._free += lanes
        return good

    def _input(self, holder: int, tag: int, unit: Unit, lane: int, blocks: Blocks) -> Operation:
        buffer = self._lanes[lane][: blocks.nbytes(unit)]
        yield from self._receive(holder, tag, buffer, is_told=False)
        if blocks.compares:
            blocks.took(unit, xxhash.xxh3_64_intdigest(buffer.data))
        return True

    def _send(self, peer: int, tag: int, raw: np.ndarray, check: int | None) -> Operation:
        mpi, comm = self._world.mpi, self._world.data
        digest = np.array([check or 0], dtype="<u8")
        requests = [comm.Isend([raw, mpi.BYTE], peer, tag + _BODY)]
        if check is not None:
            requests.append(comm.Isend([digest, mpi.BYTE], peer, tag + _CHECK))
        reach("parity.sent")
        yield True
        for request in requests:
            yield from done(request)

    def _receive(self, peer: int, tag: int, into: np.ndarray, is_told: bool) -> Operation:
        """Receive a block; return whether it matches the checksum that follows, if one does, and this checksum."""
        mpi, comm = self._world.mpi, self._world.data
        digest = np.empty(1, dtype="<u8")
        body = comm.Irecv([into, mpi.BYTE], peer, tag + _BODY)
        notice = comm.Irecv([digest, mpi.BYTE], peer, tag + _CHECK) if is_told else None
        yield True
        yield from done(body)
        if notice is None:
            return True, 0
        yield from done(notice)
        return xxhash.xxh3_64_intdigest(into.data) == int(digest[0]), int(digest[0])


def _tag(task: int, unit: int) -> int:
    return _FIRST_TAG + ((task % _TAGGED) * MAX_GROUP + unit) * 3


def in_order(operations: Iterator[Operation], width: int) -> Operation:
    """Begin operations in their order, so many at a time; the result is whether all of them returned True.

    Each makes its first step before the next one begins, so that what it posts is posted in order.
    """
    running: list[Operation] = []
    good = True
    while True:
        running += itertools.islice(operations, width - len(running))
        if not running:
            return good
        moved = False
        for operation in list(running):
            try:
                moved |= next(operation)
            except StopIteration as end:
                good &= end.value
                running.remove(operation)
                moved = True
        yield moved
