"""Bad blocks, lost slots, missing copies and parity → what they were, from what is left.

After a restore, copies and parity that are missing are made (`reprotect`). At rest, damage that `scrub` finds is
repaired before the next save is protected: first header and block table, where the blocks agree with them; then blocks
of own slots, in place; then copies and parity files, next to the damaged ones.
Nothing damaged is given up before there is something better: a restore finds what it found before.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from ..commit.certification import Saved
from ..commit.courier_state import CourierState
from ..commit.earlier_runs import Choice, ParityGroup, choose
from ..crash_points import reach
from ..errors import CorruptSlot, MlflashError
from ..memory.inventory import Place
from ..memory.node_directory import file_number
from ..memory.parity_layout import Head, Stripes, Task, Unit, heads_blocks, read_heads
from ..memory.slot import Attempt, Slot, Use, table_check, unpack
from ..mpi.nonblocking import AT_ONCE, Operation, done
from ..mpi.world import World
from ..protect.parity import ParityExchange, roles_of
from ..protect.transfer import Source, slot_of
from ..state.layout import Extents
from .scrub import Scrubber

log = logging.getLogger("mlflash")

_BLOCK = 51
_TRIES = 3  # to reprotect what a restore has loaded


def repair(context: CourierState, scrubber: Scrubber) -> None:
    """Repair what can be repaired. Collective over the world; in a job, while no save is being protected.

    What cannot be repaired stays as it is. No rank counts as damaged afterwards: the next finding begins anew.
    """
    context.damaged = False
    start, world = time.perf_counter(), context.world
    home = max((slot for slot in context.pool.own if slot.use is Use.HOLDS and slot.header is not None),
               key=lambda slot: slot.generation, default=None)  # fmt: skip
    header = None if home is None or home.header is None or context.unprotected is not None else home.header
    attempts = world.gather(None if header is None else (header.attempt, header.world_size))
    if home is None or header is None or any(attempt != (header.attempt, world.size) for attempt in attempts):
        return  # on all ranks: there is no attempt that all of them hold
    reach("repair.begun")
    damaged = scrubber.damaged
    for slot in (home, *_holding(context, header.attempt)):
        _restore_head(slot)
    blocks, is_whole = _repair_own(context, home, header.attempt)
    reach("repair.blocks")
    made = 0
    if world.all_of(is_whole):
        made = _reprotect(context, home, header.attempt)
    else:
        lost_ranks = [rank for rank, is_intact in enumerate(world.gather(is_whole)) if not is_intact]
        if world.rank == 0:
            log.warning("step %d: the slots of ranks %s stay damaged because neither copies nor parity can "
                        "repair them; the next commit replaces them", header.step, lost_ranks)  # fmt: skip
    reach("repair.done")
    world.renew_deadline()
    repaired = [slot for slot in damaged if slot.use is not Use.HOLDS or _is_whole(context, slot)]
    scrubber.forget(repaired)
    if damaged or blocks or made:
        still_damaged = len(damaged) - len(repaired)
        context.recorder.repaired(header.step, time.perf_counter() - start, blocks, made, still_damaged)
        log.info("rank %d repaired what it holds of step %d: %d blocks repaired, %d files made again, %d still damaged",
                 world.rank, header.step, blocks, made, still_damaged)  # fmt: skip


def _restore_head(slot: Slot) -> None:
    """Write header and block table of a slot as they were, if that is known."""
    header = slot.header
    assert header is not None
    extents = header.extents
    if table_check(slot.table(extents)) != header.table_check:
        made = slot.check_blocks(extents, 0, extents.blocks)
        if table_check(made) != header.table_check:
            return  # blocks are damaged as well
        slot.table(extents)[:] = made
    if slot.stored_header() != header:
        slot.seal(header)
        give_receipts(slot)


def _repair_own(context: CourierState, home: Slot, attempt: Attempt) -> tuple[int, bool]:
    """Repair the own slots of all ranks; return how many blocks were repaired here, and whether this slot is whole."""
    world = context.world
    bad = _bad_blocks(context, home)
    # A slot whose table is lost takes no part, because nothing tells what its blocks must be.
    damaged = {rank: blocks for rank, blocks in enumerate(world.gather(bad)) if blocks}
    if not damaged:
        return 0, bad is not None
    _repair_from_copies(context, home, attempt, damaged)
    still_bad = _still_bad(home, bad)
    context.recorder.counts["blocks repaired"] += len(bad or ()) - len(still_bad)
    damaged = {rank: blocks for rank, blocks in enumerate(world.gather(still_bad)) if blocks}
    if damaged and context.protection.placement.parity_groups and world.all_of(bad is not None):
        _repair_from_parity(context, home, attempt, damaged)
        still_bad = _still_bad(home, still_bad)
    return len(bad or ()) - len(still_bad), bad is not None and not still_bad


def _bad_blocks(context: CourierState, home: Slot) -> list[int] | None:
    """The bad blocks of a slot; None if its table is damaged."""
    assert home.header is not None
    if table_check(home.table(home.header.extents)) != home.header.table_check:
        return None
    return home.bad_blocks(home.header.extents, context.copy_threads)


def _still_bad(home: Slot, blocks: Sequence[int] | None) -> list[int]:
    good = _good(home, blocks or ())
    return [block for block in blocks or () if block not in good]


def _repair_from_parity(context: CourierState, home: Slot, attempt: Attempt, damaged: Mapping[int, list[int]]) -> None:
    """Repair blocks from parity; each member of a group must read its own slot."""
    world = context.world
    choice = choose(context.take_stock().of(attempt), world.topology.node_of)
    is_own = choice is not None and choice.source[world.rank] == (world.node_index, file_number(home.name))
    if not world.all_of(is_own) or choice is None:
        return
    able = {rank: blocks for rank, blocks in damaged.items() if choice.group_of(rank) is not None}
    repairs = ParityRepairs(context, choice, range(world.size), {world.rank: home}, able)
    if able and not repairs.beyond:
        repairs.run()
    repairs.close()


def _reprotect(context: CourierState, home: Slot, attempt: Attempt) -> int:
    """Make copies and parity again that are not whole; return how many were made here."""
    world, pool, protection = context.world, context.pool, context.protection
    before = _holding(context, attempt)
    lacking = protection.missing(pool, attempt, forget=False)
    has_room = all(any(slot.use is Use.FREE for slot in pair) for pair in pool.inbox.values())
    agreed = world.agree(any_of={"lacking": lacking}, all_of={"have_room": has_room})
    if not agreed.lacking or not agreed.have_room:
        return 0
    try:
        protect_missing(context, home, lacking)
    except MlflashError as error:  # the same on all ranks
        if world.rank in (0, error.rank):
            log.warning("copies or parity could not be made again: %s", error)
        return 0
    reach("repair.copied")
    new = [slot for slot in _holding(context, attempt) if not any(slot is other for other in before)]
    give_receipts(*new)
    for pair in pool.inbox.values():
        if any(slot is other for other in new for slot in pair):
            for slot in pair:
                if any(slot is other for other in before):
                    slot.unseal()
                    slot.use = Use.FREE
    return len(new)


def _holding(context: CourierState, attempt: Attempt) -> list[Slot]:
    return [slot for slot in context.protection.kept(context.pool, attempt) if slot.use is Use.HOLDS]


def _is_whole(context: CourierState, slot: Slot) -> bool:
    assert slot.header is not None
    return slot.stored_header() == slot.header and _bad_blocks(context, slot) == []


# From copies. A block comes from the first partner whose copy of it is whole, and is written only if it matches the
# table of the damaged slot. Nothing is unsealed: whatever happens meanwhile, no block gets worse.


def _repair_from_copies(context: CourierState, home: Slot, attempt: Attempt, damaged: Mapping[int, Sequence[int]]
                        ) -> None:  # fmt: skip
    """Repair blocks that copies have; ``home``: the own slot, with a whole table if any of its blocks are damaged.

    Collective over the world.
    """
    world, placement = context.world, context.protection.placement
    held = {rank: copy for rank in damaged if (copy := _copy_of(context, rank, attempt)) is not None}
    good_here = {rank: _good(copy, damaged[rank]) for rank, copy in held.items()}
    good: list[dict[int, list[int]]] = world.gather(good_here)
    work: list[Operation] = []
    waits: set[int] = set()
    for rank, blocks in damaged.items():
        remaining = list(blocks)
        for partner in placement.partners[rank]:
            has = set(good[partner].get(rank, ()))
            given, remaining = [b for b in remaining if b in has], [b for b in remaining if b not in has]
            if given and partner == world.rank:
                work.append(_send_blocks(world, held[rank], rank, given))
                waits.add(rank)
            elif given and rank == world.rank:
                work.append(_receive_blocks(world, home, partner, given))
                waits.add(partner)
    world.waiting_for = sorted(waits)
    world.drive(work)
    world.waiting_for = ()


def _copy_of(context: CourierState, owner: int, attempt: Attempt) -> Slot | None:
    for slot in context.pool.inbox.get(owner, ()):
        if owner != context.world.rank and slot.use is Use.HOLDS and slot.header is not None:
            try:
                slot.verify_table()
            except CorruptSlot:
                continue
            if slot_of(owner, attempt)(slot.header):
                return slot
    return None


def _good(copy: Slot, blocks: Sequence[int]) -> list[int]:
    assert copy.header is not None
    extents = copy.header.extents
    table = copy.table(extents)
    return [b for b in blocks if b < extents.blocks and copy.check_blocks(extents, b, b + 1)[0] == table[b]]


def _send_blocks(world: World, copy: Slot, peer: int, blocks: Sequence[int]) -> Operation:
    assert copy.header is not None
    extents = copy.header.extents
    for block in blocks:
        raw = copy.run(extents, block, block + 1)
        yield from done(world.data.Isend([raw, world.mpi.BYTE], peer, _BLOCK))
        yield True


def _receive_blocks(world: World, home: Slot, peer: int, blocks: Sequence[int]) -> Operation:
    assert home.header is not None
    extents = home.header.extents
    body, table = home.body(extents), home.table(extents)
    for block in blocks:
        arrived = np.empty_like(body[extents.block(block)])
        yield from done(world.data.Irecv([arrived, world.mpi.BYTE], peer, _BLOCK))
        if xxhash.xxh3_64_intdigest(arrived.data) == int(table[block]):
            body[extents.block(block)] = arrived
        yield True


# From parity. A damaged block is one lost unit of one stripe. Damage that is scattered over several members of a group
# is repaired as long as no stripe has lost more than the scheme covers. Blocks are repaired in place. The slot of a
# lost node is rebuilt in a free slot of the rank that it belongs to, by all members of its group together.


@dataclasses.dataclass
class GroupRepair:
    """What has to be done for one group."""

    group: ParityGroup
    extents: tuple[Extents, ...]
    tasks: list[Task]
    heads: dict[int, Head]  # header and block table of the ranks whose slots are rebuilt
    slot_rank: tuple[int, ...]  # slot_rank, parity_rank: for each member, the ranks that read its slot and parity file
    parity_rank: tuple[int, ...]


class ParityRepairs:
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
        self._repairs: list[GroupRepair] = []
        self.beyond: list[Place] = []
        self.rebuilt: dict[int, Slot] = {}
        affected = {group.ranks: group for rank in (*choice.rebuilt, *damaged) if (group := choice.group_of(rank))}
        for _, group in sorted(affected.items()):
            self._examine(group)

    def _examine(self, group: ParityGroup) -> None:
        world, topology = self._context.world, self._context.world.topology
        places = zip(group.ranks, group.files, strict=True)
        readers = [-1 if place is None else topology.reader(rank, place[0]) for rank, place in places]
        bad_here = [(nth, self._verify(group, nth)) for nth, reader in enumerate(readers) if reader == world.rank]
        bad: dict[int, list[int] | None] = dict(pair for pairs in world.gather(bad_here) for pair in pairs)
        good = [nth for nth in range(len(group.ranks)) if bad.get(nth) is not None]
        rebuilt = [rank for rank in group.ranks if rank in self._choice.rebuilt]
        heads_here = None
        if good and readers[good[0]] == world.rank:
            heads = read_heads(self._parity[group, good[0]])
            wanted = [(header.pack(), table.tobytes()) for header, table in heads if header.rank in rebuilt]
            heads_here = (tuple(header.extents for header, _ in heads), wanted)
        heads_here = next((heads for heads in world.gather(heads_here) if heads is not None), None)
        if heads_here is None:
            self._give_up(group)
            return
        extents, packed = heads_here
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
        self._repairs.append(GroupRepair(group, extents, tasks, known, slot_rank, tuple(readers)))

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
    """The blocks of groups while they are repaired: see `parity.Blocks`."""

    compares = False
    pace = AT_ONCE

    def __init__(self, repairs: Sequence[GroupRepair], slots: Mapping[int, Slot],
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


# Reprotect: copies and parity that are missing are made, of the restored step, and of what an ended courier left.


def give_receipts(*slots: Slot) -> None:
    """Write the commit receipt: with it, every remaining node knows that the step was committed."""
    for slot in slots:
        if slot.header is not None and not slot.committed:
            slot.record_commit(slot.header.attempt, slot.header.step)


def reprotect_or_remember(context: CourierState, home: Slot) -> None:
    """Call `reprotect`, with a few retries. If it fails, this is remembered, and each later save first tries again."""
    for _ in range(_TRIES):
        try:
            reprotect(context, home)
        except MlflashError as error:  # the same on all ranks
            if context.unprotected is None and context.world.rank in (0, error.rank):
                log.warning("the restored step has no full redundancy: %s", error)
            context.unprotected = home
            if not isinstance(error, CorruptSlot):
                return  # only a copy that arrived damaged may arrive whole at another try
        else:
            context.unprotected = None
            assert home.header is not None
            context.pool.free_older(home.header.attempt)
            return


def reprotect_left(context: CourierState) -> tuple[int | None, int]:
    """Make the redundancy whole of the newest attempt in memory, as a courier may have died before it was.

    Collective over the world. The slots of all ranks may be sealed although no rank has agreed that all copies are:
    then the attempt counts as committed only when they are. Until then the attempt before is kept. Return step and
    generation of what counts as committed; None and 0: nothing does.
    """
    world, pool, attempt = context.world, context.pool, context.left.attempt
    home = next((slot for slot in pool.own if slot.header is not None and slot.header.attempt == attempt), None)
    if not world.all_of(home is not None) or home is None or attempt is None:
        pool.free_older(attempt or Attempt(bytes(16), 0))
        return None, 0
    is_whole = context.protection.is_complete(pool, attempt)
    agreed = world.agree(any_of={"seen": home.committed}, all_of={"whole": is_whole})
    context.restored.rolled_forward = not agreed.seen
    if agreed.whole:
        give_receipts(home, *context.protection.kept(pool, attempt), *_keep(context, home))
        pool.free_older(attempt)
    else:
        reprotect_or_remember(context, home)
    assert home.header is not None
    counts = context.unprotected is None or not context.restored.rolled_forward
    return (home.header.step, attempt.generation) if counts else (None, 0)


def reprotect(context: CourierState, home: Slot) -> None:
    """Make the copies and parity of the restored attempt in their new places; then free everything else. Collective.

    Raises:
        MemoryTooSmall, SaveFailed: on all ranks; what was there before is untouched.
    """
    world, pool, protection = context.world, context.pool, context.protection
    header = home.header
    assert header is not None
    if not context.restored.rolled_forward:
        pool.drop_stale()
    lacking = protection.missing(pool, header.attempt)
    some_lack = world.any_of(lacking)
    reach("reprotect.begun")
    if some_lack:
        protect_missing(context, home, lacking)
        reach("reprotect.copied")
    kept = protection.kept(pool, header.attempt)
    give_receipts(home, *kept)
    shares = pool.shares_of(header.attempt)
    pool.keep_only([home, *shares, *kept, *_keep(context, home)])
    pool.drop_spare()
    reach("reprotect.freed")
    # Make room for the next save.
    demand = [(slot, header.extents.nbytes) for slot in pool.own]
    demand += [(slot, share.header.extents.nbytes) for share in shares if share.header for slot in pool.shares]
    for owner, pair in pool.inbox.items():
        sizes = [copy.header.extents.nbytes for copy in kept if copy.header is not None and copy.header.rank == owner]
        demand += [(slot, nbytes) for nbytes in sizes for slot in pair]
    context.ensure_room(demand)
    reach("reprotect.done")


def _keep(context: CourierState, home: Slot) -> list[Slot]:
    """Write own states and shares of the attempt in own slots to disks, if the history is there. Collective."""
    header, pool = home.header, context.pool
    if header is None or not context.config.keeps_on_disk:
        return []
    if context.world.all_of(context.keep_on_disk(home, *pool.shares_of(header.attempt))):
        context.certification.keep(Saved(header.attempt, header.step))
    kept = pool.kept_of(header.attempt)
    for slot in kept:
        slot.use = Use.HOLDS
    return kept


def protect_missing(context: CourierState, home: Slot, lacking: bool) -> None:
    """Make the copies and parity that `Protection.missing` has found to be missing. Collective over the world."""
    world, pool, protection = context.world, context.pool, context.protection
    header = home.header
    assert header is not None
    context.recorder.counts["slots reprotected"] += lacking
    demand = protection.offer(pool, header.extents if lacking else None, only_missing=True)
    context.ensure_room(demand, pairs=False)  # of each pair, the other slot may hold the last copy of the step before
    is_intact = protection.protect(pool, Source(home, header.extents, None, context.pace), header.attempt)
    error: MlflashError | None = None
    if not is_intact:
        error = CorruptSlot(
            "its copies or parity did not arrive whole", rank=world.rank, node=world.node_name, step=header.step
        )
    try:
        world.raise_together(error)
    except MlflashError:  # if a copy failed on any rank, its slot must be free for the next save
        pool.release(header.attempt, [home], False)
        raise
    pool.release(header.attempt, [home], True)
