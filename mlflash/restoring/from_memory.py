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

import logging
from collections.abc import Mapping

from ..crash_points import reach
from ..errors import CorruptSlot, WorldSizeChanged
from ..memory import commit_records
from ..memory.inventory import Inventory, Place
from ..memory.slot import Slot
from ..memory.slot_header import Attempt, Verdict
from ..memory.wanted_step import WantedStep
from ..redundancy.rank_checkpoint import RankCheckpoint, ShareFiles, open_rank_checkpoint
from ..redundancy.slot_transfer import slot_of
from ..startup.choose_checkpoint import Choice, choose
from ..startup.context import Context
from .fetch_slots import fetch
from .found import FoundElsewhere
from .gather_deduplicated import gather_shares
from .heal import give_receipts
from .rebuild_from_parity import Repairs

log = logging.getLogger("mlflash")


def restorable_steps(context: Context, alike: bool = False) -> list[int]:
    """List the steps for which some node has every rank's slot, ascending. Collective over the world.

    Args:
        context: of this rank.
        alike: only those that the same number of ranks has saved.
    """
    found = context.take_stock()
    whole = [
        step
        for attempt, step, size in found.attempts()
        if (not alike or size == context.world.size) and choose(found.of(attempt), context.world.topology.node_of)
    ]
    return sorted(set(whole))


def find_and_verify(
    context: Context, wanted: WantedStep, others: bool = False, oldest: int = 0, checked: bool = True,
    struck: dict[Place, str] | None = None,
) -> RankCheckpoint | FoundElsewhere | None:  # fmt: skip
    """Bring the newest restorable attempt that fits the request into this rank's own slot.

    Collective over the world.

    Args:
        context: of this rank.
        wanted: which checkpoint is asked for.
        others: if another number of ranks saved it, bring it to where it can be read.
        oldest: pass over attempts of a smaller generation, because there is something newer elsewhere.
        checked: verify every byte, not only headers and tables.
        struck: gets the files that were found to be damaged, and how; the same on all ranks.

    Returns:
        This rank's state, every byte of it verified on every rank; or what this rank has of other ranks' states; None
        if there is nothing.

    Raises:
        WorldSizeChanged: another number of ranks saved it, and it must not be resharded.
    """
    context.pool.take_back()
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
            raise _other_ranks(choice, context.world.size)
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


def _opened(context: Context, choice: Choice, slots: Mapping[int, Slot], files: ShareFiles
            ) -> RankCheckpoint | FoundElsewhere:  # fmt: skip
    """Open what was brought here, and note where it came from. Collective over the world."""
    context.restores, context.restored_verdict = choice.restores + 1, choice.verdict
    mine = {
        rank: open_rank_checkpoint(context.pool.open, context.world.node_index, slot, files)
        for rank, slot in slots.items()
    }
    if choice.world_size != context.world.size:
        context.restored_from = "other ranks"
        context.rolled_forward = False
        return FoundElsewhere(choice.attempt, choice.step, context.restores, mine, files)
    place, own = choice.source[context.world.rank], slots[context.world.rank]
    context.restored_from = "parity" if place is None else context.world.topology.node_names[place[0]]
    context.rolled_forward = bool(context.world.agree([int(not own.committed)])[0])
    if not context.rolled_forward:
        give_receipts(own)
    return mine[context.world.rank]


def _other_ranks(choice: Choice, size: int) -> WorldSizeChanged:
    return WorldSizeChanged(
        "another number of ranks saved the checkpoint in memory: restore(state) converts it to this number. To "
        "ignore it, use another job name, `fresh` or `mlflash clean`",
        step=choice.step, expected=f"a world of {choice.world_size} ranks", found=f"{size}",
    )  # fmt: skip


def why_not(context: Context, struck: Mapping[Place, str]) -> tuple[dict[int, str], list[int]]:
    """Return why memory gives nothing. Collective over the world.

    Args:
        struck: files that were found to be damaged, and how.

    Returns:
        Why each committed step cannot be restored, the newest first; and the steps of saves that did not end.
    """
    traces = [one for one in context.find_traces() if one.attempt is None or one.attempt.generation >= context.floor]
    told = commit_records.why_not(traces, struck, context.world.topology.node_names)
    return told, sorted({one.step for one in traces if one.step >= 0} - told.keys())


def count(context: Context, home: Slot) -> None:
    """Count, once per run, that a run has restored this attempt, and warn if other runs have done so before.

    The count is stored with the slot; a newer commit begins a new one.
    """
    header = home.header
    assert header is not None
    if header.attempt == context.counted:
        return
    context.counted = header.attempt
    home.record_restores(header.attempt, context.restores)
    if context.restores > 1 and context.world.rank == 0:
        log.warning(
            "step %d was restored %d times now and nothing newer was committed since: if training always fails at the "
            "same place, Checkpointer(skip_stuck=%d) takes the step before it",
            header.step, context.restores, context.restores,
        )  # fmt: skip


def _bring(context: Context, there: Inventory, choice: Choice, slots: dict[int, Slot], checked: bool
           ) -> dict[Place, str]:  # fmt: skip
    """Verify, rebuild, repair and fetch the slots of a choice; if that fails, return the files to do without, and why.

    Args:
        there: all that the nodes hold, also what is passed over: the certified step may be part of it.
        slots: gets the slots of other ranks that this rank has, if the ranks of the choice are not those of this run.
    """
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


def _verify(context: Context, choice: Choice, serves: list[int], slots: dict[int, Slot], checked: bool
            ) -> tuple[dict[int, list[int]], dict[Place, str]]:  # fmt: skip
    """Verify every byte of the slots of a choice, on all ranks.

    Args:
        slots: gets those that this rank reads.
        checked: verify every byte, not only table and manifest.

    Returns:
        Bad blocks that parity may repair, by rank; files that cannot be restored from, and why.
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


def _open(context: Context, attempt: Attempt, rank: int, place: Place) -> Slot:
    slot = context.pool.open(place[1])
    if not _is(slot, rank, attempt):
        raise CorruptSlot("the header of a slot changed", rank=rank)
    return slot


def _bad_blocks(context: Context, slot: Slot, parity: bool) -> list[int]:
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


def _servers(context: Context, choice: Choice) -> list[int]:
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


def _fetch(context: Context, choice: Choice, serves: list[int], slots: dict[int, Slot]) -> list[Place]:
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
