"""Parity: the ranks of a group hold XOR or Reed-Solomon parity of each other's slots.

Blocks go from several ranks to one, are coded there, and the results go to where they belong: for encoding and for
rebuilding. All ranks of a group know the same list of tasks. In the order of the list, each sends the inputs that it
holds, codes its own tasks, and receives the outputs that belong to it. A few tasks are in progress at a time, in
buffers of one block per unit. The rank that codes blocks makes a checksum of each, which is compared with the table of
its slot; coded blocks travel with their checksums.

Blocks always travel by messages (Isend/Irecv). A Put into a buffer that is used again cannot be told from what the
buffer held before: if both are equal, such as zeros, the receiver takes the block for arrived, uses the buffer for
another block, and the Put then overwrites that one.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash

from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.parity_layout import Head, Stripes, Task, Unit, heads_blocks, pack_heads, parity_extents, read_heads
from ..memory.slot import HEADER_NBYTES, MAX_GROUP, Attempt, Header, Slot, Use, table_check, unpack
from ..memory.slot_pool import SlotPool, any_intact
from ..mpi.nonblocking import Operation, SendRate, done, side_by_side
from ..mpi.world import World
from ..placement.redundancy import Placement
from ..state import layout
from ..state.layout import Extents
from . import erasure_codes
from .transfer import Source, offer, swap

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
        """This rank's part in some tasks, as operations whose result is whether every block was intact."""
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
            in_place = blocks.rank_of(unit) == me and blocks.nbytes(unit) == self.block_nbytes
            made.append(blocks.place(unit) if in_place else self._lanes[lane])
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


# A slot is sent block by block to the ranks that code its stripes, and its checksums are made at the same time. When
# all parity is in place, every member gets the heads of all slots, and seals its parity file.


_HEAD, _TABLE = 31, 32


class Parity:
    """Makes and keeps this rank's share of its group's parity. Collective over the world."""

    def __init__(self, world: World, placement: Placement, job: str):
        self._world, self._job = world, job
        self.group = placement.parity_group_of[world.rank]
        self.scheme = placement.scheme.sized(len(self.group))
        self._others = [rank for rank in self.group if rank != world.rank]
        self._exchange: ParityExchange | None = None
        self._planned: tuple[tuple[Stripes, tuple[int, ...]], Roles] | None = None
        self._lacking: Sequence[int] = ()  # ranks whose parity is missing
        self._holders: Sequence[int] = ()  # ranks that get parity now
        self._extents: dict[int, Extents] = {}
        self._target: Slot | None = None

    @property
    def owners(self) -> tuple[int, ...]:
        return (self._world.rank,) if self.group else ()

    @property
    def waiting_for(self) -> list[int]:
        return self._others if self._extents else []

    def inbox_nbytes(self, nbytes_of: Sequence[int]) -> dict[int, int]:
        if not self.group:
            return {}
        blocks = [-(-nbytes_of[rank] // layout.BLOCK_NBYTES) for rank in self.group]
        return {self._world.rank: parity_extents(blocks, self.scheme.losses, layout.BLOCK_NBYTES).nbytes}

    def offer(self, pool: SlotPool, extents: Extents | None, only_missing: bool) -> list[tuple[Slot, int]]:
        """See `Protection.offer`. If a rank of the group takes no part, no parity is made. Collective over it."""
        self._extents, self._target = {}, None
        if not self.group:
            return []
        sizes = {**offer(self._world, dict.fromkeys(self._others, extents), self._others), self._world.rank: extents}
        known = {rank: sizes[rank] for rank in self.group}
        if any(size is None for size in known.values()):
            return []
        self._extents = {rank: size for rank, size in known.items() if size is not None}
        block_nbytes = self._extents[self._world.rank].block_nbytes
        if self._exchange is None or self._exchange.block_nbytes != block_nbytes:
            self._exchange = ParityExchange(self._world, block_nbytes, len(self.group))
        self._holders = self._lacking if only_missing else self.group
        if self._world.rank not in self._holders:
            return []
        self._target = pool.free_slot(pool.inbox[self._world.rank])
        if self._target is None:
            raise AssertionError("both parity slots hold something")
        return [(self._target, self._parity_extents.nbytes)]

    @property
    def _stripes(self) -> Stripes:
        return Stripes(tuple(self._extents[rank].blocks for rank in self.group), self.scheme.losses)

    @property
    def _parity_extents(self) -> Extents:
        block_nbytes = self._extents[self._world.rank].block_nbytes
        return parity_extents(self._stripes.blocks, self.scheme.losses, block_nbytes)

    def moves(self, pool: SlotPool, source: Source, attempt: Attempt) -> list[Operation]:
        """Make the parity, as operations whose result is whether this rank's share is complete and sealed."""
        return [self._make(source, attempt)] if self._extents else []

    def _make(self, source: Source, attempt: Attempt) -> Operation:
        exchange, target = self._exchange, self._target
        assert exchange is not None
        if target is not None:
            while not target.is_ready:
                yield False
            target.unseal()
        made = None if target is None else target.workplace(self._parity_extents)
        positions = [self.group.index(rank) for rank in self._holders]
        blocks = _GroupBlocks(self.group, self._extents, source, made, self._parity_extents)
        stripes = self._stripes
        good = all((yield from side_by_side(exchange.moves(self._roles(stripes, positions), blocks))))
        source.seal()
        heads = yield from self._swap_heads(source)
        if target is None or made is None:
            return good
        reach("parity.received")
        good = good and (yield from self._seal(target, made, attempt, heads, blocks))
        reach("parity.sealed")
        return good

    def _roles(self, stripes: Stripes, positions: list[int]) -> Roles:
        key = (stripes, tuple(positions))
        if self._planned is None or self._planned[0] != key:
            roles = roles_of(self._world.rank, stripes.encode(positions), lambda unit: self.group[unit.member])
            self._planned = (key, roles)
        return self._planned[1]

    def _swap_heads(self, source: Source) -> Operation:
        """Send this rank's head to those that get parity, and receive theirs; return raw heads and tables, by rank."""
        mpi, comm, me = self._world.mpi, self._world.data, self._world.rank
        page = source.slot.view[:HEADER_NBYTES].copy()
        table = np.array(source.slot.table(source.extents))
        heads = {me: (page, table)}
        requests = []
        for peer in self._others if me in self._holders else ():
            heads[peer] = (np.empty(HEADER_NBYTES, np.uint8), np.empty(self._extents[peer].blocks, "<u8"))
            requests += [comm.Irecv([heads[peer][0], mpi.BYTE], peer, _HEAD),
                         comm.Irecv([heads[peer][1], mpi.BYTE], peer, _TABLE)]  # fmt: skip
        for peer in self._holders:
            if peer != me:
                requests += [comm.Isend([page, mpi.BYTE], peer, _HEAD), comm.Isend([table, mpi.BYTE], peer, _TABLE)]
        for request in requests:
            yield from done(request)
        return heads

    def _seal(self, target: Slot, made: Slot, attempt: Attempt, raw: dict[int, tuple[np.ndarray, np.ndarray]],
              blocks: _GroupBlocks) -> Operation:  # fmt: skip
        """Write heads, table and header, unless a slot does not match the blocks that were coded."""
        heads: list[Head] = []
        for rank in self.group:
            header = _good_head(*raw[rank], rank, attempt, self._extents[rank])
            if header is None or not blocks.matches(rank, raw[rank][1]):
                return False
            heads.append((header, raw[rank][1]))
        packed, extents = pack_heads(heads), self._parity_extents
        room = made.body(extents)[: extents.manifest_room]
        room[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        room[len(packed) :] = 0
        first = heads_blocks(extents)
        table = made.table(extents)
        table[:first] = made.check_blocks(extents, 0, first)
        is_stored = target.store(made)
        while is_stored() is None:
            yield False
        if not is_stored():
            return False
        own = next(header for header, _ in heads if header.rank == self._world.rank)
        target.seal(
            Header(
                attempt=attempt, step=own.step, rank=own.rank, world_size=self._world.size,
                node_index=self._world.node_index, local_rank=self._world.local_rank, manifest_nbytes=len(packed),
                extents=extents, table_check=table_check(table), unix_ns=time.time_ns(),
                node=self._world.node_name, scheme=str(self.scheme), job=self._job, group=self.group,
                parities=self.scheme.losses, mark=own.mark,
            )
        )  # fmt: skip
        target.use = Use.BUSY
        return target.header is not None

    def missing(self, pool: SlotPool, attempt: Attempt, forget: bool = True) -> bool:
        """Whether a rank of the group lacks its parity: each checks its own, and ``forget`` unseals bad ones."""
        if not self.group:
            return False
        intact = any_intact(self.kept(pool, attempt), _verify, f"rank {self._world.rank}: parity", forget)
        answer = (int(intact), 0, 0)
        answers = swap(self._world, dict.fromkeys(self._others, answer), self._others)
        has = {**answers, self._world.rank: list(answer)}
        self._lacking = [rank for rank in self.group if not has[rank][0]]
        return bool(self._lacking)

    def kept(self, pool: SlotPool, attempt: Attempt) -> list[Slot]:
        """The inbox slots that hold this rank's parity of an attempt, for the group of today."""
        wanted = (self._world.rank, attempt, self.group, self.scheme.losses)
        return [
            slot
            for owner in self.owners
            for slot in pool.inbox[owner]
            if (h := slot.header) is not None and (h.rank, h.attempt, h.group, h.parities) == wanted
        ]


class _GroupBlocks:
    """The blocks of a group while its parity is made: see `Blocks`."""

    compares = True

    def __init__(self, group: Sequence[int], sizes: dict[int, Extents], source: Source, target: Slot | None,
                 parity: Extents):  # fmt: skip
        self._group, self._sizes, self._source, self._target, self._parity = group, sizes, source, target, parity
        self.pace = source.pace
        self._body = source.slot.body(source.extents)
        self._table = source.slot.table(source.extents)
        self._first = heads_blocks(parity)
        self._seen: dict[int, dict[int, int]] = {rank: {} for rank in group}

    def rank_of(self, unit: Unit) -> int:
        return self._group[unit.member]

    def nbytes(self, unit: Unit) -> int:
        if unit.parity:
            return self._parity.block_nbytes
        where = self._sizes[self._group[unit.member]].block(unit.block)
        return where.stop - where.start

    def read(self, unit: Unit) -> tuple[np.ndarray, int]:
        self._source.check_up_to(unit.block + 1)
        return self._body[self._source.extents.block(unit.block)], int(self._table[unit.block])

    def place(self, unit: Unit) -> np.ndarray:
        assert self._target is not None
        return self._target.body(self._parity)[self._parity.block(self._first + unit.block)]

    def placed(self, unit: Unit, check: int) -> bool:
        assert self._target is not None
        self._target.table(self._parity)[self._first + unit.block] = check
        return True

    def took(self, unit: Unit, check: int) -> None:
        self._seen[self._group[unit.member]][unit.block] = check

    def matches(self, rank: int, table: np.ndarray) -> bool:
        """Whether the blocks of a rank that were coded here match its table."""
        return all(int(table[block]) == check for block, check in self._seen[rank].items())


def _verify(slot: Slot) -> None:
    slot.verify()
    read_heads(slot)


def _good_head(page: np.ndarray, table: np.ndarray, rank: int, attempt: Attempt, extents: Extents) -> Header | None:
    try:
        header = unpack(page.tobytes())
    except CorruptSlot:
        return None
    same = (header.rank, header.attempt, header.extents) == (rank, attempt, extents)
    return header if same and table_check(table) == header.table_check else None
