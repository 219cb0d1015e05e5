"""Memory → the newest whole checkpoint, on every rank; then the redundancy made whole again.

    take stock   each node lists its sealed slots; all ranks make the same choice
    verify       every byte of every slot that will be used, on all ranks, before anything is loaded
    repair       lost slots and damaged blocks are made again from parity, where there is some
    fetch        slots that are on another node come to a slot of the rank's own
    reunite      so do the shares of what several ranks hold alike
    (load)       by the caller, from the own slot; an error there is agreed on too
    heal         copies and parity are checked, and made again where they are missing

A slot found bad is struck off the list and the choice is made again, so that all ranks always take the same
attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..crash_points import reach
from ..errors import CorruptSlot, MlflashError, WorldSizeChanged
from ..memory import commit_records
from ..memory.inventory import Choice, Inventory, Place, choose, file_name
from ..memory.segment import Segment, attach
from ..memory.slot import Slot
from ..memory.slot_header import Attempt
from ..redundancy.transfer import Source, slot_of
from ..runtime.parts import Parts
from .fetch import fetch
from .gather_shares import Home, open_home, reunite
from .open_checkpoint import Elsewhere
from .repair import Repairs

log = logging.getLogger("mlflash")

_HEAL_TRIES = 3


def restorable_steps(parts: Parts, alike: bool = False) -> list[int]:
    """List the steps of which every rank's slot is somewhere, ascending. Collective over the world.

    Args:
        parts: of this rank.
        alike: only those that as many ranks have saved.
    """
    found = parts.take_stock()
    whole = [
        step
        for attempt, step, size in found.attempts()
        if (not alike or size == parts.world.size) and choose(found.of(attempt), parts.world.topology.node_of)
    ]
    return sorted(set(whole))


def bring_home(
    parts: Parts, step: int | None, others: bool = False, oldest: int = 0, checked: bool = True,
    struck: dict[Place, str] | None = None,
) -> Home | Elsewhere | None:  # fmt: skip
    """Bring the newest restorable attempt (or that of a step) into this rank's own slot.

    Collective over the world.

    Args:
        parts: of this rank.
        step: this one only.
        others: where it is of another number of ranks, bring it to where it can be read.
        oldest: pass over attempts of a smaller generation: there is something newer elsewhere.
        checked: verify every byte, not only headers and tables.
        struck: gets the files that were found to be damaged, and how; the same on all ranks.

    Returns:
        This rank's state, every byte of it verified on every rank; or what there is of other ranks here; None where
        there is nothing.

    Raises:
        WorldSizeChanged: it was saved by another number of ranks, and is not to be resharded.
    """
    found = parts.take_stock().since(oldest)
    reach("restore.listed")
    while True:
        node_of, skip_stuck = parts.world.topology.node_of, parts.config.skip_stuck if step is None else 0
        choice = choose(found, node_of, step, skip_stuck)
        passed_over = choose(found, node_of, step) if skip_stuck else choice
        if choice is None:
            return None
        same_ranks = choice.world_size == parts.world.size
        if not same_ranks and not others:
            raise _other_ranks(choice, parts.world.size)
        slots: dict[int, Slot] = {}
        bad = _bring(parts, found, choice, slots, checked)
        if not bad:
            if same_ranks:
                own = next(slot for slot in parts.shelf.own if _is(slot, parts.world.rank, choice.attempt))
                slots = {parts.world.rank: own}
            files, lacking = reunite(parts, choice, slots, checked)
            bad = dict.fromkeys(lacking, "what it shares with other ranks is damaged or gone")
        if bad:
            parts.shelf.unmap_others(slots.values())
            found = found.without(bad)
            if struck is not None:
                struck |= bad
            continue
        parts.restores = choice.restores + 1
        if passed_over is not None and passed_over.attempt != choice.attempt and parts.world.rank == 0:
            log.warning(
                "step %d was restored %d times and nothing newer was committed since: step %d is taken instead "
                "(skip_stuck=%d)", passed_over.step, passed_over.restores, choice.step, parts.config.skip_stuck,
            )  # fmt: skip
        homes = {rank: open_home(parts, slot, files) for rank, slot in slots.items()}
        if not same_ranks:
            parts.restored_from = "other ranks"
            parts.rolled_forward = False
            return Elsewhere(choice.attempt, choice.step, parts.restores, homes, files)
        place = choice.source[parts.world.rank]
        parts.restored_from = "parity" if place is None else parts.world.topology.node_names[place[0]]
        parts.rolled_forward = bool(parts.world.agree([int(not own.committed)])[0])
        if not parts.rolled_forward:
            _give_receipts(own)
        return homes[parts.world.rank]


def _other_ranks(choice: Choice, size: int) -> WorldSizeChanged:
    return WorldSizeChanged(
        "the checkpoint in memory was saved by another number of ranks: restore(state) puts it together for this one; "
        "or leave it behind with another job name, `fresh`, or `mlflash clean`",
        step=choice.step, expected=f"a world of {choice.world_size} ranks", found=f"{size}",
    )  # fmt: skip


def why_not(parts: Parts, struck: Mapping[Place, str]) -> tuple[dict[int, str], list[int]]:
    """Say why memory gives nothing. Collective over the world.

    Args:
        struck: files that were found to be damaged, and how.

    Returns:
        Why each step that was committed cannot be restored, the newest first; and the steps of saves that did not end.
    """
    traces = [one for one in parts.find_traces() if one.attempt is None or one.attempt.generation >= parts.floor]
    told = commit_records.why_not(traces, struck, parts.world.topology.node_names)
    return told, sorted({one.step for one in traces if one.step >= 0} - told.keys())


def count(parts: Parts, home: Slot) -> None:
    """Count, once a run, that a run has restored this attempt, and warn where others have done so before.

    Not collective. The count goes with the slot; a newer commit begins a new one.
    """
    header = home.header
    assert header is not None
    if header.attempt == parts.counted:
        return
    parts.counted = header.attempt
    home.record_restores(header.attempt, parts.restores)
    if parts.restores > 1 and parts.world.rank == 0:
        log.warning(
            "step %d was restored %d times now and nothing newer was committed since: if training always fails at the "
            "same place, Checkpointer(skip_stuck=%d) takes the step before it",
            header.step, parts.restores, parts.restores,
        )  # fmt: skip


def _bring(parts: Parts, found: Inventory, choice: Choice, slots: dict[int, Slot], checked: bool
           ) -> dict[Place, str]:  # fmt: skip
    """Verify the slots of a choice, rebuild, repair and fetch; gives the files to do without, and why, where it failed.

    Args:
        slots: gets the slots of other ranks that this rank has, where the ranks of the choice are not those of today.
    """
    same_ranks = choice.world_size == parts.world.size
    serves = _servers(parts, choice)
    read: dict[int, Slot] = {}
    damaged, bad = _verify(parts, choice, serves, read, checked)
    repairs = None
    if not bad and (damaged or choice.rebuilt):
        repairs = Repairs(parts, choice, serves, read, damaged)
        bad = dict.fromkeys(repairs.beyond, "it is damaged, and parity cannot give it back")
    if not bad:
        reach("restore.verified")
        parts.adopt(found, choice)
        reach("restore.adopted")
        lost = repairs.run() if repairs is not None else []
        bad = dict.fromkeys(lost, "what parity made of it is not whole")
        if not bad and same_ranks:
            bad = dict.fromkeys(_fetch(parts, choice, serves, read), "it did not arrive whole from its node")
    if repairs is not None:
        repairs.close()
    if bad or same_ranks:
        parts.shelf.unmap_others(read.values())
        return bad
    slots |= read
    for rank, slot in (repairs.rebuilt if repairs is not None else {}).items():
        slots[rank] = slot
        parts.shelf.keep_for_now(slot)
    return {}


def _verify(parts: Parts, choice: Choice, serves: list[int], slots: dict[int, Slot], checked: bool
            ) -> tuple[dict[int, list[int]], dict[Place, str]]:  # fmt: skip
    """Verify every byte of the slots of a choice, on all ranks.

    Args:
        slots: gets those that this rank reads.
        checked: every byte, not only table and manifest.

    Returns:
        Bad blocks that parity may repair, by rank; files that cannot be restored from, and why.
    """
    world = parts.world
    mine: list[tuple[int, list[int] | str]] = []
    for rank, place in enumerate(choice.source):
        if serves[rank] == world.rank and place is not None:
            try:
                mapped = parts.shelf.mapped() if choice.world_size == world.size else {}
                slots[rank] = _open(parts, choice.attempt, rank, place, mapped)
                blocks = _bad_blocks(parts, slots[rank], choice.group_of(rank) is not None) if checked else []
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


def _open(parts: Parts, attempt: Attempt, rank: int, place: Place, mapped: dict[int, Segment]) -> Slot:
    slot = Slot(attach(parts.memory, file_name(place[1]), mapped))
    if not _is(slot, rank, attempt):
        raise CorruptSlot("the header of a slot changed", rank=rank)
    return slot


def _bad_blocks(parts: Parts, slot: Slot, parity: bool) -> list[int]:
    """Read every byte of a slot; returns the bad blocks where there is parity to repair them."""
    if not parity:
        slot.verify(parts.crew)
        slot.manifest()
        return []
    assert slot.header is not None
    slot.verify_table()
    bad = slot.bad_blocks(slot.header.extents, parts.crew)
    if bad:
        log.warning("%d of %d blocks of %s are damaged, first block %d: parity is asked for them",
                    len(bad), slot.header.extents.blocks, slot.name, bad[0])  # fmt: skip
    else:
        slot.manifest()
    return bad


def _servers(parts: Parts, choice: Choice) -> list[int]:
    """For each rank of the choice, who reads its slot: the rank itself where it is on its node, else one of that node,
    in turn. Where it is rebuilt: the rank itself, or where there is none, any.
    """
    topology, size = parts.world.topology, parts.world.size
    return [
        rank % size if place is None else topology.reader(rank, place[0]) for rank, place in enumerate(choice.source)
    ]


def _is(slot: Slot, rank: int, attempt: Attempt) -> bool:
    return slot.header is not None and (slot.header.rank, slot.header.attempt) == (rank, attempt)


def _fetch(parts: Parts, choice: Choice, serves: list[int], slots: dict[int, Slot]) -> list[Place]:
    """Bring slots from other nodes; returns those that did not arrive whole."""
    world = parts.world
    if all(server == rank for rank, server in enumerate(serves)):
        return []
    mine = {rank: slots[rank] for rank, server in enumerate(serves) if server == world.rank and rank != world.rank}
    server = serves[world.rank] if serves[world.rank] != world.rank else None
    home = None if server is None else parts.shelf.free_slot(parts.shelf.own)
    whole = fetch(parts, mine, server, home, slot_of(world.rank, choice.attempt))
    reach("restore.fetched")
    parts.journal.counts["slots fetched"] += server is not None
    failed = [] if whole else [choice.source[world.rank]]
    return sorted(place for places in world.gather(failed) for place in places if place is not None)


def _give_receipts(*slots: Slot) -> None:
    """Write the receipt of their commit into slots that came from another node, or rolled forward and are whole now.

    Not collective. So that whatever node is left knows that the step was committed.
    """
    for slot in slots:
        if slot.header is not None and not slot.committed:
            slot.record_commit(slot.header.attempt, slot.header.step)


def heal_or_remember(parts: Parts, home: Slot) -> None:
    """Heal, a few times over; what cannot be healed now is remembered, and each later save tries again first.

    Collective over the world.
    """
    for _ in range(_HEAL_TRIES):
        try:
            heal(parts, home)
        except MlflashError as error:  # the same on all ranks
            if parts.unhealed is None and parts.world.rank in (0, error.rank):
                log.warning("the restored step has no full redundancy: %s", error)
            parts.unhealed = home
            if not isinstance(error, CorruptSlot):
                return  # only a copy that arrived damaged may arrive whole next time
        else:
            parts.unhealed = None
            assert home.header is not None
            parts.shelf.free_older(home.header.attempt)
            return


def heal(parts: Parts, home: Slot) -> None:
    """Make the redundancy of the restored attempt whole in its new places; then free everything else.

    Collective over the world.

    Raises:
        MemoryTooSmall, SaveFailed: on all ranks; what was there before is untouched.
    """
    world, shelf, protection = parts.world, parts.shelf, parts.protection
    header = home.header
    assert header is not None
    if not parts.rolled_forward:
        shelf.drop_stale()
    lacking = protection.missing(shelf, header.attempt)
    whole = world.agree([int(not lacking)])[0]
    reach("heal.begun")
    if not whole:
        _protect_again(parts, home, lacking)
        reach("heal.copied")
    kept = protection.kept(shelf, header.attempt)
    _give_receipts(home, *kept)
    shares = [slot for slot in shelf.shares if slot.header is not None and slot.header.attempt == header.attempt]
    shelf.keep_only([home, *shares, *kept])
    shelf.drop_spare()
    reach("heal.freed")
    # The next save shall find room.
    demand = [(slot, header.extents.nbytes) for slot in shelf.own]
    demand += [(slot, share.header.extents.nbytes) for share in shares if share.header for slot in shelf.shares]
    for owner, pair in shelf.inbox.items():
        sizes = [copy.header.extents.nbytes for copy in kept if copy.header is not None and copy.header.rank == owner]
        demand += [(slot, nbytes) for nbytes in sizes for slot in pair]
    parts.ensure_room(demand)
    reach("heal.done")


def _protect_again(parts: Parts, home: Slot, lacking: bool) -> None:
    world, shelf, protection = parts.world, parts.shelf, parts.protection
    header = home.header
    assert header is not None
    parts.journal.counts["slots healed"] += lacking
    demand = protection.offer(shelf, header.extents if lacking else None, again=True)
    parts.ensure_room(demand, pairs=False)  # the other slot of a pair may hold the last copy of the step before
    whole = protection.protect(shelf, Source(home, header.extents, None, parts.pace), header.attempt)
    error: MlflashError | None = None
    if not whole:
        error = CorruptSlot(
            "its redundancy did not arrive whole", rank=world.rank, node=world.node_name, step=header.step
        )
    try:
        world.raise_together(error)
    except MlflashError:  # where a copy failed somewhere its slot must be free for the next save
        shelf.release(header.attempt, [home], False)
        raise
    shelf.release(header.attempt, [home], True)
