"""The redundancy of this rank's slots: copies, parity, or both if the nodes have different numbers of ranks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

import numpy as np

from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.parity_layout import Head, Stripes, Unit, heads_blocks, pack_heads, parity_extents, read_heads
from ..memory.slot import HEADER_NBYTES, Attempt, Header, Slot, Use, table_check, unpack
from ..memory.slot_pool import SlotPool, any_whole
from ..mpi.fabric import OpenMemory, choose_transport
from ..mpi.nonblocking import Operation, done, side_by_side
from ..mpi.world import World
from ..placement.protection_groups import Placement
from ..state import layout
from ..state.layout import Extents
from .parity import ParityExchange, Roles, roles_of
from .transfer import Source, offer, receive, send, slot_of, swap


class Protection:
    """Makes and keeps the redundancy of this rank's slots, and its share of others'. Collective over the world."""

    def __init__(self, world: World, placement: Placement, transport: str, job: str):
        self._world = world
        self.placement, self.partners = placement, placement.partners[world.rank]
        world.form_groups(placement.connected)
        self.transport = choose_transport(world, transport)
        self._copies = PartnerCopies(world, placement, self.transport)
        self._parity = Parity(world, placement, job)
        self._parts = (self._copies, self._parity) if self._parity.group else (self._copies,)

    @property
    def group(self) -> tuple[int, ...]:
        return self._parity.group or (self._world.rank, *self.partners)

    @property
    def scheme(self) -> str:
        if self._parity.group:
            return str(self._parity.scheme)
        return "none" if not self.partners else "copy" if len(self.partners) == 1 else f"copy:{len(self.partners)}"

    @property
    def owners(self) -> tuple[int, ...]:
        """Keys of this rank's inbox pairs: the ranks whose copies it holds; itself for its parity."""
        return (*self._copies.owners, *self._parity.owners)

    def inbox_nbytes(self, nbytes_of: Sequence[int]) -> dict[int, int]:
        return {**self._copies.inbox_nbytes(nbytes_of), **self._parity.inbox_nbytes(nbytes_of)}

    def open_windows(self, pool: SlotPool) -> None:
        self._copies.open_windows(pool)

    def close_windows(self) -> None:
        self._copies.close_windows()

    def offer(self, pool: SlotPool, extents: Extents | None, again: bool = False) -> list[tuple[Slot, int]]:
        """Announce what this rank will send; returns the inbox slots needed for what comes, with their bytes.

        Collective over the group.

        Args:
            extents: parts of the slot to send; None sends nothing.
            again: only what `missing` found missing.
        """
        return [need for part in self._parts for need in part.offer(pool, extents, again)]

    def protect(self, pool: SlotPool, source: Source, attempt: Attempt) -> bool:
        """Exchange what was offered; whether all arrived whole. The own slot and whole inbox slots are sealed then."""
        work = [operation for part in self._parts for operation in part.moves(pool, source, attempt)]
        self._world.waiting_for = sorted({rank for part in self._parts for rank in part.waiting_for})
        arrived = self._world.drive(work)
        self._world.waiting_for = ()
        source.seal()
        return all(arrived)

    def missing(self, pool: SlotPool, attempt: Attempt, forget: bool = True) -> bool:
        """Whether redundancy of an attempt is missing; ``forget``: unseal damaged slots. Collective over the group."""
        lacking = [part.missing(pool, attempt, forget) for part in self._parts]
        return any(lacking)

    def is_complete(self, pool: SlotPool, attempt: Attempt) -> bool:
        return len({slot.header.rank for slot in self.kept(pool, attempt) if slot.header}) == len(self.owners)

    def kept(self, pool: SlotPool, attempt: Attempt) -> list[Slot]:
        return [slot for part in self._parts for slot in part.kept(pool, attempt)]


# Copies: each slot is sent whole to partners, which are ranks on other nodes


class PartnerCopies:
    """Sends this rank's slots to its partners and receives those of the ranks it holds copies of."""

    def __init__(self, world: World, placement: Placement, transport: str):
        self._world, self._transport = world, transport
        self._owners_of = placement.owners
        self.partners = placement.partners[world.rank]
        self.owners = placement.owners[world.rank]
        number = placement.connected[world.rank]
        self._members = [rank for rank, other in enumerate(placement.connected) if other == number]
        self._most_owners = max(len(placement.owners[rank]) for rank in self._members)
        self._windows: list[list[OpenMemory]] = []
        self._sends: Sequence[int] = ()
        self._comes: dict[int, Extents] = {}
        self._lacking: Sequence[int] = ()
        self._targets: dict[int, Slot] = {}

    def inbox_nbytes(self, nbytes_of: Sequence[int]) -> dict[int, int]:
        return {owner: nbytes_of[owner] for owner in self.owners}

    def open_windows(self, pool: SlotPool) -> None:
        """Expose the inbox slots. Collective over the group; nothing happens with the transport p2p."""
        if self._transport != "rma":
            return
        for index in range(pool.copies):
            row = []
            for nth in range(self._most_owners):
                inbox = pool.inbox[self.owners[nth]][index].view if nth < len(self.owners) else None
                row.append(OpenMemory(self._world, self._world.group, inbox))
            self._windows.append(row)

    def close_windows(self) -> None:
        """Take the inbox slots back. Collective over the group; must come before a slot gets a new file."""
        for row in self._windows:
            for window in row:
                window.free()
        self._windows = []

    def offer(self, pool: SlotPool, extents: Extents | None, again: bool) -> list[tuple[Slot, int]]:
        lacking = self._lacking if again else self.partners
        self._sends = lacking if extents is not None else ()
        to = {partner: extents if partner in self._sends else None for partner in self.partners}
        self._comes = {q: e for q, e in offer(self._world, to, self.owners).items() if e is not None}
        self._targets = {}
        for owner in self._comes:
            slot = pool.free_slot(pool.inbox[owner])
            if slot is None:
                raise AssertionError(f"both inbox slots for rank {owner} hold something")
            self._targets[owner] = slot
        return [(self._targets[owner], e.nbytes) for owner, e in self._comes.items()]

    def moves(self, pool: SlotPool, source: Source, attempt: Attempt) -> list[Operation]:
        """Exchange what was offered, as operations whose result is whether a slot arrived whole."""
        work = []
        for partner in self._sends:
            window = functools.partial(self._window_at, partner) if self._transport == "rma" else None
            work.append(send(self._world, partner, source, window))
        for owner, extents in self._comes.items():
            slot = self._targets[owner]
            index = pool.inbox[owner].index(slot)
            exposed = (index, self._windows[index][self.owners.index(owner)]) if self._transport == "rma" else None
            work.append(receive(self._world, owner, slot, extents, slot_of(owner, attempt), exposed))
        return work

    @property
    def waiting_for(self) -> list[int]:
        return [*self._comes, *self._sends]

    def _window_at(self, partner: int, index: int) -> tuple[OpenMemory, int]:
        nth = self._owners_of[partner].index(self._world.rank)
        return self._windows[index][nth], self._members.index(partner)

    def missing(self, pool: SlotPool, attempt: Attempt, forget: bool = True) -> bool:
        """Whether a partner lacks a copy of this rank's slot: each checks its own, and ``forget`` unseals bad ones."""
        what = f"rank {self._world.rank}: a copy"
        whole = {owner: any_whole(_copies_of(pool, owner, attempt), Slot.verify, what, forget) for owner in self.owners}
        have = {owner: (int(held), 0, 0) for owner, held in whole.items()}
        answer = swap(self._world, have, self.partners)
        self._lacking = [partner for partner, (held, _, _) in answer.items() if not held]
        return bool(self._lacking)

    def kept(self, pool: SlotPool, attempt: Attempt) -> list[Slot]:
        return [slot for owner in self.owners for slot in _copies_of(pool, owner, attempt)]


def _copies_of(pool: SlotPool, owner: int, attempt: Attempt) -> list[Slot]:
    return [slot for slot in pool.inbox[owner] if slot.header is not None and slot_of(owner, attempt)(slot.header)]


# Parity: the ranks of a group hold XOR or Reed-Solomon parity of each other's slots. A slot is sent block by block to
# the ranks that code its stripes, and its checksums are made at the same time. When all parity is in place, every
# member gets the heads of all slots, and seals its parity file.


log = logging.getLogger("mlflash")

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

    def offer(self, pool: SlotPool, extents: Extents | None, again: bool) -> list[tuple[Slot, int]]:
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
        self._holders = self._lacking if again else self.group
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
        """Make the parity, as operations whose result is whether this rank's share is whole and sealed."""
        return [self._make(source, attempt)] if self._extents else []

    def _make(self, source: Source, attempt: Attempt) -> Operation:
        exchange, target = self._exchange, self._target
        assert exchange is not None
        if target is not None:
            while target.segment is not None and not target.segment.ready.is_set():
                yield False
            target.unseal()
        positions = [self.group.index(rank) for rank in self._holders]
        blocks = _GroupBlocks(self.group, self._extents, source, target, self._parity_extents)
        stripes = self._stripes
        good = all((yield from side_by_side(exchange.moves(self._roles(stripes, positions), blocks))))
        source.seal()
        heads = yield from self._swap_heads(source)
        if target is None:
            return good
        reach("parity.received")
        good = good and self._seal(target, attempt, heads, blocks)
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

    def _seal(self, target: Slot, attempt: Attempt, raw: dict[int, tuple[np.ndarray, np.ndarray]],
              blocks: _GroupBlocks) -> bool:  # fmt: skip
        """Write heads, table and header, unless a slot does not match the blocks that were coded."""
        heads: list[Head] = []
        for rank in self.group:
            header = _good_head(*raw[rank], rank, attempt, self._extents[rank])
            if header is None or not blocks.agrees(rank, raw[rank][1]):
                return False
            heads.append((header, raw[rank][1]))
        packed, extents = pack_heads(heads), self._parity_extents
        room = target.body(extents)[: extents.manifest_room]
        room[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        room[len(packed) :] = 0
        first = heads_blocks(extents)
        table = target.table(extents)
        table[:first] = target.check_blocks(extents, 0, first)
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
        return True

    def missing(self, pool: SlotPool, attempt: Attempt, forget: bool = True) -> bool:
        """Whether a rank of the group lacks its parity: each checks its own, and ``forget`` unseals bad ones."""
        if not self.group:
            return False
        whole = any_whole(self.kept(pool, attempt), _verify, f"rank {self._world.rank}: parity", forget)
        answer = (int(whole), 0, 0)
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
    """The blocks of a group while its parity is made: see `parity_exchange.Blocks`."""

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

    def agrees(self, rank: int, table: np.ndarray) -> bool:
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
