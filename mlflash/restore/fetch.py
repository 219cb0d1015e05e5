"""Memory → the newest whole checkpoint, on every rank; then lost copies and parity are made again.

    take stock   each node lists its sealed slots; all ranks make the same choice
    verify       every byte of every slot that will be used, on all ranks, before anything is loaded
    repair       lost slots and damaged blocks are rebuilt from parity, if there is any
    fetch        slots on other nodes are copied to a slot of the rank's own
    gather       so are the shares of what several ranks hold alike
    (load)       by the caller, from its own slot; the ranks agree on an error there, too
    heal         copies and parity are checked, and made again if they are missing

A slot that is found to be bad is removed from the list and the choice is made again, so that all ranks always take the
same attempt.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..courier.choose_checkpoint import Choice, choose
from ..courier.state import CourierState
from ..crash_points import reach
from ..drain.drain import Drain
from ..drain.queue import DrainQueue
from ..drain.rank_input import DrainInput
from ..errors import CorruptSlot, WorldSizeChanged
from ..memory import commit_records
from ..memory.inventory import Inventory, Place
from ..memory.node_directory import file_number
from ..memory.slot import Attempt, Header, Kind, Slot, Use, Verdict
from ..memory.wanted_step import NEWEST, WantedStep
from ..mpi.fabric import OpenMemory
from ..protect.deduplication import Share, cuts
from ..protect.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..protect.transfer import Source, offer, receive, send, slot_of
from ..state.manifest import Shared
from .open_in_memory import FoundElsewhere
from .rebuild import Repairs
from .reprotect import give_receipts, heal

log = logging.getLogger("mlflash")


def restorable_steps(context: CourierState, alike: bool = False) -> list[int]:
    """List the steps for which some node has every rank's slot, ascending. Collective over the world."""
    found = context.take_stock()
    whole = [
        step
        for attempt, step, size in found.attempts()
        if (not alike or size == context.world.size) and choose(found.of(attempt), context.world.topology.node_of)
    ]
    return sorted(set(whole))


def find_and_verify(
    context: CourierState, wanted: WantedStep, others: bool = False, oldest: int = 0, checked: bool = True,
    struck: dict[Place, str] | None = None,
) -> RankCheckpoint | FoundElsewhere | None:  # fmt: skip
    """Bring the newest restorable attempt that fits the request into this rank's own slot. Collective.

    Args:
        others: if another number of ranks saved it, bring it to where it can be read.
        oldest: pass over attempts of a smaller generation, because there is something newer elsewhere.
        struck: gets the files that were found to be damaged, and how; the same on all ranks.

    Returns:
        This rank's state, every byte of it verified on every rank; or what this rank has of other ranks' states; None
        if there is nothing.

    Raises:
        WorldSizeChanged: another number of ranks saved it, and it must not be resharded.
    """
    context.pool.exchange()
    there = context.take_stock()
    reach("restore.listed")
    while True:
        found = there.since(oldest)
        node_of, is_free = context.world.topology.node_of, wanted.is_newest
        skip_stuck, skip_suspect = context.config.skip_stuck * is_free, context.config.on_suspect == "keep" and is_free
        choice = choose(found, node_of, wanted, skip_stuck, skip_suspect)
        passed_over = choose(found, node_of, wanted) if skip_stuck or skip_suspect else choice
        if choice is None:
            return None
        same_ranks = choice.world_size == context.world.size
        if not same_ranks and not others:
            raise WorldSizeChanged(
                "another number of ranks saved the checkpoint in memory: restore(state) converts it to this number. To "
                "ignore it, use another job name, `fresh` or `mlflash clean`",
                step=choice.step, expected=f"a world of {choice.world_size} ranks", found=f"{context.world.size}",
            )  # fmt: skip
        slots: dict[int, Slot] = {}
        bad = _bring(context, there, choice, slots, checked)
        if not bad:
            if same_ranks:
                own = next(slot for slot in context.pool.own if _is(slot, context.world.rank, choice.attempt))
                slots = {context.world.rank: own}
            files, lacking = gather_shares(context, choice, slots, checked)
            bad = dict.fromkeys(lacking, "the tensors that it shares with other ranks are damaged or missing")
        if bad:
            context.pool.unmap_others(slots.values())
            there = there.without(bad)
            if struck is not None:
                struck |= bad
            continue
        if context.world.rank == 0:
            _warn(choice, passed_over, skip_stuck)
        return _opened(context, choice, slots, files)


def _warn(choice: Choice, passed_over: Choice | None, skip_stuck: int) -> None:
    """Log why the newest attempt is not taken, or what is wrong with the one that is taken."""
    if passed_over is not None and passed_over.attempt != choice.attempt:
        if skip_stuck and passed_over.restores >= skip_stuck:
            log.warning(
                "step %d was restored %d times and nothing newer was committed since: step %d is taken instead "
                "(skip_stuck=%d)", passed_over.step, passed_over.restores, choice.step, skip_stuck,
            )  # fmt: skip
        else:
            log.warning("the values of step %d were suspect when it was saved: step %d is taken instead "
                        "(on_suspect='keep')", passed_over.step, choice.step)  # fmt: skip
    if choice.verdict is Verdict.SUSPECT:
        log.warning("step %d is restored, and its values were suspect when it was saved: restore(before=%d) takes an "
                    "older one", choice.step, choice.step)  # fmt: skip
    elif choice.verdict is Verdict.BAD:
        log.warning("step %d is restored, which was marked bad", choice.step)


def _opened(context: CourierState, choice: Choice, slots: Mapping[int, Slot], files: ShareFiles
            ) -> RankCheckpoint | FoundElsewhere:  # fmt: skip
    context.restored.restores, context.restored.verdict = choice.restores + 1, choice.verdict
    mine = {
        rank: open_rank_checkpoint(context.pool.open, context.world.node_index, slot, files)
        for rank, slot in slots.items()
    }
    if choice.world_size != context.world.size:
        context.restored.source = "other ranks"
        context.restored.rolled_forward = False
        return FoundElsewhere(choice.attempt, choice.step, context.restored.restores, mine, files)
    place, own = choice.source[context.world.rank], slots[context.world.rank]
    context.restored.source = "parity" if place is None else context.world.topology.node_names[place[0]]
    context.restored.rolled_forward = not context.world.any_of(own.committed)
    if not context.restored.rolled_forward:
        give_receipts(own)
    return mine[context.world.rank]


def why_not(context: CourierState, struck: Mapping[Place, str]) -> tuple[dict[int, str], list[int]]:
    """Return why each committed step in memory cannot be restored, newest first; and the steps whose saves did not end.

    Collective over the world.
    """
    traces = [one for one in context.find_traces() if one.attempt is None or one.attempt.generation >= context.floor]
    told = commit_records.why_not(traces, struck, context.world.topology.node_names)
    return told, sorted({one.step for one in traces if one.step >= 0} - told.keys())


def count(context: CourierState, home: Slot) -> None:
    """Count, once per run, that a run has restored this attempt, and warn if other runs have done so before.

    The count is stored with the slot; a newer commit begins a new one.
    """
    header = home.header
    assert header is not None
    if header.attempt == context.restored.counted:
        return
    context.restored.counted = header.attempt
    home.record_restores(header.attempt, context.restored.restores)
    if context.restored.restores > 1 and context.world.rank == 0:
        log.warning(
            "step %d was restored %d times now and nothing newer was committed since: if training always fails at the "
            "same place, Checkpointer(skip_stuck=%d) takes the step before it",
            header.step, context.restored.restores, context.restored.restores,
        )  # fmt: skip


def _bring(context: CourierState, there: Inventory, choice: Choice, slots: dict[int, Slot], checked: bool
           ) -> dict[Place, str]:  # fmt: skip
    """Verify, rebuild, repair and fetch the slots of a choice; if that fails, return the files to do without."""
    same_ranks = choice.world_size == context.world.size
    serves = _servers(context, choice)
    read: dict[int, Slot] = {}
    damaged, bad = _verify(context, choice, serves, read, checked)
    repairs = None
    if not bad and (damaged or choice.rebuilt):
        repairs = Repairs(context, choice, serves, read, damaged)
        bad = dict.fromkeys(repairs.beyond, "it is damaged, and parity cannot rebuild it")
    if not bad:
        reach("restore.verified")
        context.adopt(there, choice)
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


def _verify(context: CourierState, choice: Choice, serves: list[int], slots: dict[int, Slot], checked: bool
            ) -> tuple[dict[int, list[int]], dict[Place, str]]:  # fmt: skip
    """Verify every byte of the slots of a choice, on all ranks.

    Return bad blocks that parity may repair, by rank; and files that cannot be restored from, and why.
    """
    world = context.world
    mine: list[tuple[int, list[int] | str]] = []
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
                mine.append((rank, getattr(error, "message", str(error))))
            else:
                mine += [(rank, blocks)] if blocks else []
    found = [pair for pairs in world.gather(mine) for pair in pairs]
    bad = {place: why for rank, why in found if isinstance(why, str) and (place := choice.source[rank]) is not None}
    return {rank: blocks for rank, blocks in found if not isinstance(blocks, str)}, dict(sorted(bad.items()))


def _open(context: CourierState, attempt: Attempt, rank: int, place: Place) -> Slot:
    slot = context.pool.open(place[1])
    if not _is(slot, rank, attempt):
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


def _is(slot: Slot, rank: int, attempt: Attempt) -> bool:
    return slot.header is not None and (slot.header.rank, slot.header.attempt) == (rank, attempt)


def _fetch(context: CourierState, choice: Choice, serves: list[int], slots: dict[int, Slot]) -> list[Place]:
    """Fetch slots from other nodes; return those that did not arrive whole."""
    world = context.world
    if all(server == rank for rank, server in enumerate(serves)):
        return []
    mine = {rank: slots[rank] for rank, server in enumerate(serves) if server == world.rank and rank != world.rank}
    server = serves[world.rank] if serves[world.rank] != world.rank else None
    home = None if server is None else context.pool.free_slot(context.pool.own)
    whole = fetch(context, mine, server, home, slot_of(world.rank, choice.attempt))
    reach("restore.fetched")
    context.recorder.counts["slots fetched"] += server is not None
    failed = [] if whole else [choice.source[world.rank]]
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
    window = None
    if context.protection.transport == "rma":
        window = OpenMemory(world, world.world, None if target is None else target.view)
    exposed = None if window is None else (0, window)
    work = []
    for rank, sent in to.items():
        aim = None if window is None else _fixed(window, rank)
        work.append(send(world, rank, Source(serves[rank], sent, None), aim))
    if server is not None and target is not None and extents is not None:
        work.append(receive(world, server, target, extents, is_wanted, exposed))
    world.waiting_for = sorted({*to, *([] if server is None else [server])})
    arrived = world.drive(work)
    world.waiting_for = ()
    if window is not None:
        window.free()
    if target is None:
        return True
    target.use = Use.HOLDS if arrived[-1] else Use.FREE
    return bool(arrived[-1])


def _fixed(window: OpenMemory, rank: int) -> Callable[[int], tuple[OpenMemory, int]]:
    return lambda number: (window, rank)


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
    mine = {rank: shared for rank, slot in slots.items() if (shared := slot.manifest().shared) is not None}
    files, bad = ({}, []) if not context.world.any_of(mine) else _gather_shares(context, choice, mine, checked)
    reach("restore.gathered")
    return files, bad


def _gather_shares(
    context: CourierState, choice: Choice, mine: Mapping[int, Shared], checked: bool
) -> tuple[ShareFiles, list[Place]]:
    needs = context.world.gather(mine)
    lacking = {rank for theirs in needs for rank, shared in theirs.items()
               if any((shared.by, number) not in choice.shares for number in range(shared.shares))}  # fmt: skip
    if lacking:  # their slots exist, but shares that they need do not: this attempt is incomplete
        return {}, sorted({place for rank in lacking for place in _files_of(choice, rank)})
    errands = list(_errands(context, choice, [[*theirs.values()] for theirs in needs]))
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
            here = [place for place in places if place[0] == node]
            place = here[0] if here else places[(node + nth) % len(places)]
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
    found = (header.kind, header.attempt, (header.shared_by, header.share), header.extents.payload_nbytes)
    return found == (Kind.SHARE, attempt, errand.share, errand.nbytes)


def _fetch_some(context: CourierState, attempt: Attempt, errands: list[_Errand]
                ) -> tuple[dict[tuple[int, Share], int], list[Place]]:  # fmt: skip
    """Fetch one share each for some ranks; return the files where they are now, and those that could not be used."""
    world, pool = context.world, context.pool
    mine = next((errand for errand in errands if errand.rank == world.rank), None)
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
    is_mine = mine is not None and context.shares.get(world.rank) == mine.share
    if mine is not None:
        target = (pool.free_slot(pool.shares) if is_mine else None) or Slot()
    is_wanted = functools.partial(_is_share, attempt, mine) if mine is not None else lambda header: False
    whole = fetch(context, serves, None if mine is None else mine.server, target, is_wanted)
    context.recorder.counts["shares fetched"] += mine is not None
    pool.unmap_others(serves.values())
    told = None
    if mine is not None and target is not None:
        told = (mine.share, file_number(target.name), whole, mine.place)
        if not any(target is slot for slot in pool.shares):
            pool.keep_for_now(target)
            pool.unmap_others([target])
    arrived = {}
    for rank, news in enumerate(world.gather(told)):
        if news is not None:
            share, number, good, place = news
            arrived[world.topology.node_of[rank], share] = number
            bad += [] if good else [place]
    return arrived, bad


# Without training, on any number of processes: each can hand in the state of several ranks of the job. Lost slots are
# first rebuilt from copies or parity, and stay in memory.


def scavenge(context: CourierState, drains: DrainQueue) -> Drain | None:
    """Begin to drain the newest checkpoint that memory has; None if the directory has it. Collective over the world."""
    restorable = (one for one in drains.look().listed if NEWEST.fits(one.step, one.verdict))
    newest = max((one.card.attempt.generation for one in restorable), default=0)
    found = find_and_verify(context, NEWEST, others=True, oldest=newest + 1)
    if found is None:
        return None
    if isinstance(found, RankCheckpoint):
        homes, header = {context.world.rank: found}, found.header
        attempt, step, world_size, mark = header.attempt, header.step, header.world_size, header.mark
    else:
        attempt, step, homes = found.attempt, found.step, found.homes
        headers = [home.header for home in homes.values()]
        told = context.world.agree(max_of={"world_size": max((header.world_size for header in headers), default=0),
                                           "mark": max((header.mark for header in headers), default=0)})  # fmt: skip
        world_size, mark = told.world_size, told.mark
    drain_input = DrainInput(attempt, step, world_size, lambda: homes, mark, by="scavenge",
                             verdict=lambda: context.restored.verdict)  # fmt: skip
    return drains.begin(drain_input)


def heal_newest(context: CourierState) -> int | None:
    """Heal the newest checkpoint in memory, on as many ranks as the job has; return its step."""
    found = find_and_verify(context, NEWEST)
    if not isinstance(found, RankCheckpoint):
        return None
    heal(context, found.slot)
    return found.header.step
