"""Slots, shares and parts of tensors on other nodes → this node, where they are read.

Every byte is verified, where it lies and where it arrives:

verify       every byte of every slot that will be used, on all ranks, before anything is loaded
repair       lost slots and damaged blocks are rebuilt from parity, if there is any (see `repair`)
fetch        slots on other nodes are copied to a slot of the rank's own
gather       so are the shares of what several ranks hold alike
exchange     if a state is put together from slots of other ranks, they send the parts that are asked for
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..channel.wanted_parts import WantedPart, items
from ..commit.courier_state import CourierState
from ..commit.earlier_runs import Choice
from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.inventory import Inventory, Place
from ..memory.node_directory import file_number, is_on_disk
from ..memory.slot import Attempt, Header, Kind, Slot, Use
from ..mpi.nonblocking import Operation, done
from ..mpi.world import World
from ..protect import transfer
from ..protect.deduplication import Share, cuts
from ..protect.rank_checkpoint import ShareFiles
from ..protect.transfer import Source, offer, receive, send, slot_of
from ..state import layout
from ..state.boxes import box, cut
from ..state.leaves import Entry
from ..state.manifest import Shared
from ..state.rebuild import Read
from .repair import ParityRepairs

log = logging.getLogger("mlflash")

_ASK, _BODY, _CHECK = 41, 42, 43
_DEPTH = 2  # runs in flight between two ranks


def bring(context: CourierState, inventory: Inventory, choice: Choice, slots: dict[int, Slot], checked: bool
          ) -> dict[Place, str]:  # fmt: skip
    """Verify, rebuild, repair and fetch the slots of a choice; if that fails, return the files to do without."""
    same_ranks = choice.world_size == context.world.size
    serves = _servers(context, choice)
    read: dict[int, Slot] = {}
    damaged, bad = _verify(context, choice, serves, read, checked)
    repairs = None
    if not bad and (damaged or choice.rebuilt):
        repairs = ParityRepairs(context, choice, serves, read, damaged)
        bad = dict.fromkeys(repairs.beyond, "it is damaged, and parity cannot rebuild it")
    if not bad:
        reach("restore.verified")
        context.adopt(inventory, choice)
        reach("restore.adopted")
        lost = repairs.run() if repairs is not None else []
        bad = dict.fromkeys(lost, "the state that was rebuilt from parity is damaged")
        if not bad and same_ranks:
            bad = dict.fromkeys(_fetch(context, choice, serves, read), "it did not arrive whole from its node")
    if repairs is not None:
        repairs.close()
    if bad or same_ranks:
        context.pool.unmap_others(read.values())
        return bad
    slots |= read
    for rank, slot in (repairs.rebuilt if repairs is not None else {}).items():
        slots[rank] = slot
        context.pool.keep_for_now(slot)
    return {}


def copy_to_memory(context: CourierState, choice: Choice) -> dict[Place, Place]:
    """Copy what a choice has on disks into memory of its nodes, where all ranks can read it. Collective.

    Returns:
        For each new file, where it was on the disk; the same on all ranks. A file that could not be read is damaged.

    Raises:
        MemoryTooSmall: on all ranks, if a node has no room for them.
    """
    world = context.world
    copies = [(server, place) for server, place in zip(_servers(context, choice), choice.source, strict=True) if place]
    copies += [(world.topology.ranks_on[place[0]][0], place) for places in choice.shares.values() for place in places]
    copies = [(server, place) for server, place in copies if is_on_disk(place[1])]
    if not copies:
        return {}
    made: dict[Place, Place] = {}

    def copy() -> None:
        for server, place in copies:
            if server == world.rank:
                number = context.pool.copy_to_memory(place[1])
                made[world.node_index, number] = place
                reach("restore.copied")

    world.on_all(copy)
    copied = {new: old for of_rank in world.gather(made) for new, old in of_rank.items()}
    context.pool.copied |= {file for node, file in copied if node == world.node_index}
    return copied


def _verify(context: CourierState, choice: Choice, serves: list[int], slots: dict[int, Slot], checked: bool
            ) -> tuple[dict[int, list[int]], dict[Place, str]]:  # fmt: skip
    """Verify every byte of the slots of a choice, on all ranks.

    Return bad blocks that parity may repair, by rank; and files that cannot be restored from, and why.
    """
    world = context.world
    damage: list[tuple[int, list[int] | str]] = []
    for rank, place in enumerate(choice.source):
        if serves[rank] == world.rank and place is not None:
            try:
                slots[rank] = _open(context, choice.attempt, rank, place)
                blocks = _bad_blocks(context, slots[rank], choice.group_of(rank) is not None) if checked else []
                if not checked:
                    slots[rank].verify_table()
                    slots[rank].manifest()
            except (CorruptSlot, OSError) as error:
                log.warning("rank %d: this slot cannot be restored from: %s", world.rank, error)
                damage.append((rank, getattr(error, "message", str(error))))
            else:
                damage += [(rank, blocks)] if blocks else []
    reports = [pair for pairs in world.gather(damage) for pair in pairs]
    bad = {place: why for rank, why in reports if isinstance(why, str) and (place := choice.source[rank]) is not None}
    return {rank: blocks for rank, blocks in reports if not isinstance(blocks, str)}, dict(sorted(bad.items()))


def _open(context: CourierState, attempt: Attempt, rank: int, place: Place) -> Slot:
    slot = context.pool.open(place[1])
    if not is_of(slot, rank, attempt):
        raise CorruptSlot("the header of a slot changed", rank=rank)
    return slot


def _bad_blocks(context: CourierState, slot: Slot, parity: bool) -> list[int]:
    """Read every byte of a slot; return the bad blocks, if there is parity to repair them."""
    if not parity:
        slot.verify(context.copy_threads)
        slot.manifest()
        return []
    assert slot.header is not None
    slot.verify_table()
    bad = slot.bad_blocks(slot.header.extents, context.copy_threads)
    if bad:
        log.warning("%d of %d blocks of %s are damaged, first block %d: they are rebuilt from parity",
                    len(bad), slot.header.extents.blocks, slot.name, bad[0])  # fmt: skip
    else:
        slot.manifest()
    return bad


def _servers(context: CourierState, choice: Choice) -> list[int]:
    """For each rank of the choice, the rank that reads its slot.

    That is the rank itself if it is on the node of the slot, otherwise ranks of that node in turn. For a slot that is
    rebuilt, it is the rank itself, or any rank if there is no rank of that number.
    """
    topology, size = context.world.topology, context.world.size
    return [
        rank % size if place is None else topology.reader(rank, place[0]) for rank, place in enumerate(choice.source)
    ]


def is_of(slot: Slot, rank: int, attempt: Attempt) -> bool:
    """Whether a slot holds the state that a rank had at an attempt."""
    return slot.header is not None and (slot.header.rank, slot.header.attempt) == (rank, attempt)


def _fetch(context: CourierState, choice: Choice, serves: list[int], slots: dict[int, Slot]) -> list[Place]:
    """Fetch slots from other nodes; return those that did not arrive whole."""
    world = context.world
    if all(server == rank for rank, server in enumerate(serves)):
        return []
    sent = {rank: slots[rank] for rank, server in enumerate(serves) if server == world.rank and rank != world.rank}
    server = serves[world.rank] if serves[world.rank] != world.rank else None
    home = None if server is None else context.pool.free_slot(context.pool.own)
    is_intact = fetch(context, sent, server, home, slot_of(world.rank, choice.attempt))
    reach("restore.fetched")
    context.recorder.counts["slots fetched"] += server is not None
    failed = [] if is_intact else [choice.source[world.rank]]
    return sorted(place for places in world.gather(failed) for place in places if place is not None)


def fetch(context: CourierState, serves: Mapping[int, Slot], server: int | None, target: Slot | None,
          is_wanted: Callable[[Header], bool]) -> bool:  # fmt: skip
    """Send files to other ranks (``serves``) and receive one from ``server``. Collective.

    The receiver checks every byte once more. Return whether the file arrived whole.
    """
    world = context.world
    to = {rank: slot.header.extents for rank, slot in serves.items() if slot.header is not None}
    # One message for each pair of ranks: a rank fetches one file, and a server tells each of its ranks what will come.
    comes = offer(world, dict(to), [] if server is None else [server])
    extents = None if server is None else comes[server]
    context.ensure_room([] if target is None or extents is None else [(target, extents.nbytes)])
    work = [send(world, rank, Source(serves[rank], sent, None)) for rank, sent in to.items()]
    if server is not None and target is not None and extents is not None:
        work.append(receive(world, server, target, extents, is_wanted))
    world.waiting_for = sorted({*to, *([] if server is None else [server])})
    arrived = world.drive(work)
    world.waiting_for = ()
    if target is None:
        return True
    target.use = Use.HOLDS if arrived[-1] else Use.FREE
    return bool(arrived[-1])


# A node needs all shares of each set that one of its ranks belongs to. Its ranks verify, in parallel, the shares that
# are there. The others are fetched from any node that has them, and stay until the next commit.


@dataclasses.dataclass(frozen=True)
class _Errand:
    """What one rank does for its node: verify the file of a share, or fetch it."""

    share: Share
    nbytes: int
    rank: int
    node: int
    place: Place
    server: int

    @property
    def comes(self) -> bool:
        return self.place[0] != self.node


def gather_shares(
    context: CourierState, choice: Choice, slots: Mapping[int, Slot], checked: bool = True
) -> tuple[ShareFiles, list[Place]]:
    """Bring the shares that slots need to the nodes where these slots are read. Collective.

    Return where the shares are; and the files to do without, if that failed.
    """
    needed = {rank: shared for rank, slot in slots.items() if (shared := _shared(slot)) is not None}
    files, bad = ({}, []) if not context.world.any_of(needed) else _gather_shares(context, choice, needed, checked)
    reach("restore.gathered")
    return files, bad


def _shared(slot: Slot) -> Shared | None:
    """What a sealed slot shares with others, without reading its manifest if its header says that it is nothing."""
    assert slot.header is not None
    return None if slot.header.shared_by < 0 else slot.manifest().shared


def _gather_shares(
    context: CourierState, choice: Choice, needed: Mapping[int, Shared], checked: bool
) -> tuple[ShareFiles, list[Place]]:
    needs = context.world.gather(needed)
    lacking = {rank for of_rank in needs for rank, shared in of_rank.items()
               if any((shared.by, number) not in choice.shares for number in range(shared.shares))}  # fmt: skip
    if lacking:  # their slots exist, but shares that they need do not: this attempt is incomplete
        return {}, sorted({place for rank in lacking for place in _files_of(choice, rank)})
    errands = list(_errands(context, choice, [[*of_rank.values()] for of_rank in needs]))
    bad = _verify_shares(context, choice.attempt, errands, checked)
    files = {(e.node, e.share): e.place[1] for e in errands if not e.comes}
    pending = [] if bad else [e for e in errands if e.comes]
    while pending and not bad:
        now = list({errand.rank: errand for errand in reversed(pending)}.values())  # the first one of each rank
        pending = [errand for errand in pending if errand not in now]
        arrived, failed = _fetch_some(context, choice.attempt, now)
        files |= arrived
        bad = failed
    return files, bad


def _files_of(choice: Choice, rank: int) -> list[Place]:
    place, group = choice.source[rank], choice.rebuilt.get(rank)
    return [place] if place is not None else [p for p in (group.files if group else ()) if p is not None]


def _errands(context: CourierState, choice: Choice, needs: Sequence[Sequence[Shared]]) -> Iterator[_Errand]:
    """Which rank does what on each node, given where each rank needs these shares; the same list on all ranks."""
    topology = context.world.topology
    for node, ranks in enumerate(topology.ranks_on):
        needed = {
            (shared.by, number): high - low
            for rank in ranks
            for shared in needs[rank]
            for bounds in [cuts(shared.nbytes, shared.shares)]
            for number, (low, high) in enumerate(itertools.pairwise(bounds))
        }
        for nth, (share, nbytes) in enumerate(sorted(needed.items())):
            places = choice.shares[share]
            local = [place for place in places if place[0] == node]
            place = local[0] if local else places[(node + nth) % len(places)]
            whose = next((rank for rank in ranks if context.shares.get(rank) == share), ranks[nth % len(ranks)])
            yield _Errand(share, nbytes, whose, node, place, topology.reader(whose, place[0]))


def _verify_shares(context: CourierState, attempt: Attempt, errands: list[_Errand], checked: bool) -> list[Place]:
    bad = []
    for errand in errands:
        if errand.rank == context.world.rank and not errand.comes:
            try:
                slot = _open_share(context, attempt, errand)
                try:
                    if checked:
                        slot.verify(context.copy_threads)
                    else:
                        slot.verify_table()
                finally:
                    context.pool.unmap_others([slot])
            except (CorruptSlot, OSError) as error:
                log.warning("rank %d: this share cannot be restored from: %s", context.world.rank, error)
                bad.append(errand.place)
    return sorted(place for places in context.world.gather(bad) for place in places)


def _open_share(context: CourierState, attempt: Attempt, errand: _Errand) -> Slot:
    slot = context.pool.open(errand.place[1])
    if slot.header is None or not _is_share(attempt, errand, slot.header):
        raise CorruptSlot("the header of a share changed", rank=errand.rank)
    return slot


def _is_share(attempt: Attempt, errand: _Errand, header: Header) -> bool:
    content = (header.kind, header.attempt, (header.shared_by, header.share), header.extents.payload_nbytes)
    return content == (Kind.SHARE, attempt, errand.share, errand.nbytes)


def _fetch_some(context: CourierState, attempt: Attempt, errands: list[_Errand]
                ) -> tuple[dict[tuple[int, Share], int], list[Place]]:  # fmt: skip
    """Fetch one share each for some ranks; return the files where they are now, and those that could not be used."""
    world, pool = context.world, context.pool
    errand_here = next((errand for errand in errands if errand.rank == world.rank), None)
    serves: dict[int, Slot] = {}
    bad = []
    for errand in errands:
        if errand.server == world.rank:
            try:
                serves[errand.rank] = _open_share(context, attempt, errand)
            except (CorruptSlot, OSError):
                bad.append(errand.place)
    bad = sorted(place for places in world.gather(bad) for place in places)
    if bad:
        pool.unmap_others(serves.values())
        return {}, bad
    target = None
    is_own = errand_here is not None and context.shares.get(world.rank) == errand_here.share
    if errand_here is not None:
        target = (pool.free_slot(pool.shares) if is_own else None) or Slot()
    is_wanted = functools.partial(_is_share, attempt, errand_here) if errand_here is not None else lambda header: False
    is_intact = fetch(context, serves, None if errand_here is None else errand_here.server, target, is_wanted)
    context.recorder.counts["shares fetched"] += errand_here is not None
    pool.unmap_others(serves.values())
    report = None
    if errand_here is not None and target is not None:
        report = (errand_here.share, file_number(target.name), is_intact, errand_here.place)
        if not any(target is slot for slot in pool.shares):
            pool.keep_for_now(target)
            pool.unmap_others([target])
    arrived = {}
    for rank, sent in enumerate(world.gather(report)):
        if sent is not None:
            share, number, good, place = sent
            arrived[world.topology.node_of[rank], share] = number
            bad += [] if good else [place]
    return arrived, bad


# Each rank tells the others which parts of tensors it needs from them, and every part travels in runs of at most a
# chunk. Parts of a shard that is cut along another dimension are strided: the sender packs them, because a Get would
# need a datatype for each.


def exchange_fragments(
    context: CourierState, has: Mapping[int, tuple[Read, Sequence[Entry]]], asked: Mapping[int, Sequence[WantedPart]]
) -> bool:
    """Send what others ask for from what this rank ``has`` of old ranks, and receive what this rank asks for.

    Return whether all of that arrived whole.
    """
    world = context.world
    if world.world is None:
        return True
    questions = {
        rank: pickle.dumps([(p.rank, p.number, p.source, p.shape) for p in parts]) for rank, parts in asked.items()
    }
    lengths, their_lengths = np.zeros(world.size, dtype=np.int64), np.zeros(world.size, dtype=np.int64)
    for rank, text in questions.items():
        lengths[rank] = len(text)
    world.finish(world.world.Ialltoall(lengths, their_lengths))
    arrived = {int(rank): np.empty(int(their_lengths[rank]), dtype=np.uint8) for rank in np.flatnonzero(their_lengths)}
    requests = [world.data.Irecv([text, world.mpi.BYTE], rank, _ASK) for rank, text in arrived.items()]
    requests += [world.data.Isend([np.frombuffer(text, np.uint8), world.mpi.BYTE], rank, _ASK)
                 for rank, text in questions.items()]  # fmt: skip
    world.finish(*requests)
    work = [_send_fragments(world, rank, pickle.loads(text.tobytes()), has) for rank, text in arrived.items()]
    work += [_receive_fragments(world, rank, parts) for rank, parts in asked.items()]
    world.waiting_for = sorted({*arrived, *asked})
    good = world.drive(work)
    world.waiting_for = ()
    return all(good)


def _send_fragments(world: World, peer: int, wanted: Sequence[tuple[int, int, Any, Any]],
                    has: Mapping[int, tuple[Read, Sequence[Entry]]]) -> Operation:  # fmt: skip
    sent: collections.deque[tuple[Any, ...]] = collections.deque()
    for rank, number, source, shape in wanted:
        read, entries = has[rank]
        part = items(read(entries[number]), entries[number])[box(source, shape)]
        for run in _runs(part):
            raw = np.ascontiguousarray(run).reshape(-1)
            check = np.array([xxhash.xxh3_64_intdigest(raw.data)], dtype="<u8")
            body = world.data.Isend([raw, world.mpi.BYTE], peer, _BODY)
            sent.append((body, world.data.Isend([check, world.mpi.BYTE], peer, _CHECK)))
            yield True
            while len(sent) > _DEPTH:
                for request in sent.popleft():
                    yield from done(request)
    for requests in sent:
        for request in requests:
            yield from done(request)
    return True


def _receive_fragments(world: World, peer: int, wanted: Sequence[WantedPart]) -> Operation:
    runs = (run for wanted_part in wanted for run in _runs(wanted_part.target))
    posted: collections.deque[tuple[np.ndarray, np.ndarray, np.ndarray, Any, Any]] = collections.deque()
    good = True
    while True:
        while len(posted) < _DEPTH and (run := next(runs, None)) is not None:
            raw, check = np.empty(run.nbytes, dtype=np.uint8), np.empty(1, dtype="<u8")
            body = world.data.Irecv([raw, world.mpi.BYTE], peer, _BODY)
            posted.append((run, raw, check, body, world.data.Irecv([check, world.mpi.BYTE], peer, _CHECK)))
        if not posted:
            return good
        target, raw, check, body, checked = posted.popleft()
        yield from done(body)
        yield from done(checked)
        good &= xxhash.xxh3_64_intdigest(raw.data) == int(check[0])
        target[...] = raw.reshape(target.shape)
        yield True


def _runs(part: np.ndarray) -> Iterator[np.ndarray]:
    """Cut ``(*shape, item bytes)`` into runs of at most a chunk."""
    for offset, shape in cut(part.shape[:-1], part.shape[-1], transfer.CHUNK_BLOCKS * layout.BLOCK_NBYTES):
        yield part[box(offset, shape)]
