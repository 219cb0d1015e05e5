"""Lost slots and damaged blocks → rebuilt from the parity of their group.

A damaged block is one lost unit of one stripe. Damage that is scattered over several members of a group is repaired as
long as no stripe has lost more than the scheme covers. Blocks are repaired in place. The slot of a lost node is rebuilt
in a free slot of the rank that it belongs to, by all members of its group together.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from ..courier.choose_checkpoint import Choice, ParityGroup
from ..courier.state import CourierState
from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.inventory import Place
from ..memory.parity_layout import Head, Stripes, Task, Unit, heads_blocks, read_heads
from ..memory.slot import Slot, Use, unpack
from ..mpi.nonblocking import AT_ONCE
from ..protect.parity import ParityExchange, roles_of
from ..state.layout import Extents

log = logging.getLogger("mlflash")


@dataclasses.dataclass
class Repair:
    """What has to be done for one group."""

    group: ParityGroup
    extents: tuple[Extents, ...]
    tasks: list[Task]
    heads: dict[int, Head]  # header and block table of the ranks whose slots are rebuilt
    slot_rank: tuple[int, ...]  # slot_rank, parity_rank: for each member, the ranks that read its slot and parity file
    parity_rank: tuple[int, ...]


class Repairs:
    """Finds out whether a choice can be made whole, and does it.

    Collective over the world, like all its methods.

    Args:
        serves: for each rank of the choice, the rank that reads its slot, or that has the slot after it was rebuilt.

    Attributes:
        beyond: the files of groups that have lost too much; if there are any, nothing can be repaired.
    """

    def __init__(self, context: CourierState, choice: Choice, serves: Sequence[int], slots: Mapping[int, Slot],
                 damaged: Mapping[int, Sequence[int]]):  # fmt: skip
        self._context, self._choice, self._serves, self._slots, self._damaged = context, choice, serves, slots, damaged
        self._parity: dict[tuple[ParityGroup, int], Slot] = {}
        self._repairs: list[Repair] = []
        self.beyond: list[Place] = []
        self.rebuilt: dict[int, Slot] = {}
        affected = {group.ranks: group for rank in (*choice.rebuilt, *damaged) if (group := choice.group_of(rank))}
        for _, group in sorted(affected.items()):
            self._look(group)

    def _look(self, group: ParityGroup) -> None:
        world, topology = self._context.world, self._context.world.topology
        places = zip(group.ranks, group.files, strict=True)
        readers = [-1 if place is None else topology.reader(rank, place[0]) for rank, place in places]
        mine = [(nth, self._verify(group, nth)) for nth, reader in enumerate(readers) if reader == world.rank]
        bad: dict[int, list[int] | None] = dict(pair for pairs in world.gather(mine) for pair in pairs)
        good = [nth for nth in range(len(group.ranks)) if bad.get(nth) is not None]
        rebuilt = [rank for rank in group.ranks if rank in self._choice.rebuilt]
        told = None
        if good and readers[good[0]] == world.rank:
            heads = read_heads(self._parity[group, good[0]])
            wanted = [(header.pack(), table.tobytes()) for header, table in heads if header.rank in rebuilt]
            told = (tuple(header.extents for header, _ in heads), wanted)
        told = next((heads for heads in world.gather(told) if heads is not None), None)
        if told is None:
            self._give_up(group)
            return
        extents, packed = told
        stripes = Stripes(tuple(part.blocks for part in extents), group.losses, len(self._repairs))
        lost: set[Unit] = set()
        for nth, rank in enumerate(group.ranks):
            blocks = range(stripes.blocks[nth]) if rank in rebuilt else self._damaged.get(rank, ())
            lost.update(stripes.unit(nth, False, block) for block in blocks)
            gone = bad.get(nth)
            lost.update(stripes.unit(nth, True, b) for b in (range(stripes.parity_blocks) if gone is None else gone))
        tasks = stripes.rebuild(lost)
        if tasks is None:
            self._give_up(group)
            return
        known = {header.rank: (header, table) for header, table in map(_read_head, packed)}
        slot_rank = tuple(self._serves[rank] for rank in group.ranks)
        self._repairs.append(Repair(group, extents, tasks, known, slot_rank, tuple(readers)))

    def _give_up(self, group: ParityGroup) -> None:
        places = [self._choice.source[rank] for rank in group.ranks if rank in self._damaged]
        self.beyond += [place for place in (*places, *group.files) if place is not None]

    def _verify(self, group: ParityGroup, nth: int) -> list[int] | None:
        """The bad parity blocks of a file; None if nothing in it can be used."""
        place, rank, context = group.files[nth], group.ranks[nth], self._context
        assert place is not None
        try:
            slot = context.pool.open(place[1])
            header = slot.header
            wanted = (rank, self._choice.attempt, group.ranks, group.losses)
            if header is None or (header.rank, header.attempt, header.group, header.parities) != wanted:
                raise CorruptSlot("the header of a parity file changed", rank=rank)
            slot.verify_table()
            bad = slot.bad_blocks(header.extents)
            first = heads_blocks(header.extents)
            if bad and bad[0] < first:
                raise CorruptSlot(f"the heads in {slot.name} are damaged", rank=rank)
            read_heads(slot)
        except (CorruptSlot, OSError) as error:
            log.warning("rank %d: this parity cannot be used: %s", context.world.rank, error)
            return None
        self._parity[group, nth] = slot
        return [block - first for block in bad]

    def run(self) -> list[Place]:
        """Rebuild and repair; return the files to do without, if that failed."""
        context, world, pool = self._context, self._context.world, self._context.pool
        heads = {rank: head for repair in self._repairs for rank, head in repair.heads.items()}
        heads = {rank: head for rank, head in heads.items() if self._serves[rank] == world.rank}
        homes: dict[int, Slot] = {}
        for rank in heads:
            at_home = rank == world.rank and self._choice.world_size == world.size
            own = pool.free_slot(pool.own) if at_home else None
            homes[rank] = own or Slot()
        context.ensure_room([(homes[rank], header.extents.nbytes) for rank, (header, _) in heads.items()])
        for home in homes.values():
            assert home.segment is not None
            world.wait_for(home.segment.ready.is_set)
            home.unseal()
        block_nbytes = max(repair.extents[0].block_nbytes for repair in self._repairs)
        units = max(len(repair.group.ranks) for repair in self._repairs)
        exchange = ParityExchange(world, block_nbytes, units)
        blocks = RepairedBlocks(self._repairs, {**self._slots, **homes}, self._parity)
        tasks = itertools.chain.from_iterable(repair.tasks for repair in self._repairs)
        good = all(world.drive(exchange.moves(roles_of(world.rank, tasks, blocks.rank_of), blocks)))
        every = world.gather(good)  # then all have received everything sent to them
        reach("restore.rebuilt")
        for rank, home in homes.items():
            header, table = heads[rank]
            if good:
                home.table(header.extents)[:] = table
                home.seal(header)
                self.rebuilt[rank] = home
            home.use = Use.HOLDS if good else Use.FREE
            context.recorder.counts["slots rebuilt"] += good
        repaired = [len(blocks) for rank, blocks in self._damaged.items() if self._serves[rank] == world.rank]
        context.recorder.counts["blocks repaired"] += sum(repaired)
        return [] if all(every) else [p for repair in self._repairs for p in repair.group.files if p is not None]

    def close(self) -> None:
        self._context.pool.unmap_others(self._parity.values())
        self._parity = {}


def _read_head(packed: tuple[bytes, bytes]) -> Head:
    return unpack(packed[0]), np.frombuffer(packed[1], dtype="<u8")


class RepairedBlocks:
    """The blocks of groups while they are repaired: see `parity_exchange.Blocks`."""

    compares = False
    pace = AT_ONCE

    def __init__(self, repairs: Sequence[Repair], slots: Mapping[int, Slot],
                 parity: Mapping[tuple[ParityGroup, int], Slot]):  # fmt: skip
        self._repairs, self._slots, self._parity = repairs, slots, parity

    def rank_of(self, unit: Unit) -> int:
        repair = self._repairs[unit.group]
        return (repair.parity_rank if unit.parity else repair.slot_rank)[unit.member]

    def nbytes(self, unit: Unit) -> int:
        extents = self._repairs[unit.group].extents[unit.member]
        where = extents.block(unit.block)
        return extents.block_nbytes if unit.parity else where.stop - where.start

    def read(self, unit: Unit) -> tuple[np.ndarray, int]:
        if not unit.parity:
            return self.place(unit), self._expected(unit)
        slot = self._parity[self._repairs[unit.group].group, unit.member]
        assert slot.header is not None
        extents = slot.header.extents
        block = heads_blocks(extents) + unit.block
        return slot.body(extents)[extents.block(block)], int(slot.table(extents)[block])

    def place(self, unit: Unit) -> np.ndarray:
        repair = self._repairs[unit.group]
        extents, rank = repair.extents[unit.member], repair.group.ranks[unit.member]
        return self._slots[rank].body(extents)[extents.block(unit.block)]

    def placed(self, unit: Unit, check: int) -> bool:
        return check == self._expected(unit)

    def took(self, unit: Unit, check: int) -> None:
        pass

    def _expected(self, unit: Unit) -> int:
        repair = self._repairs[unit.group]
        rank = repair.group.ranks[unit.member]
        if rank in repair.heads:
            return int(repair.heads[rank][1][unit.block])
        return int(self._slots[rank].table(repair.extents[unit.member])[unit.block])
