"""Memory → the newest whole checkpoint, on every rank; then the redundancy made whole again.

    take stock   each node lists its sealed slots; all ranks make the same choice
    verify       every byte of every slot that will be used, on all ranks, before anything is loaded
    fetch        slots that are on another node come to a slot of the rank's own
    (load)       by the caller, from the own slot; an error there is agreed on too
    heal         the copies are checked and made again where they are missing

A slot found bad is struck off the list and the choice is made again, so that all ranks always take the same
attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from .copies import Copies
from .errors import CorruptSlot, MlflashError, StepNotFound, WorldSizeChanged
from .header import Attempt
from .inventory import Choice, attempts, choose, file_name, rows_of
from .parts import Parts
from .points import reach
from .segment import attach
from .slot import Slot, Use
from .transfer import Source, offer, receive, send
from .window import SlotWindow

log = logging.getLogger("mlflash")

_HEAL_TRIES = 3


def restorable_steps(parts: Parts) -> list[int]:
    """List the steps of which every rank's slot is somewhere, ascending. Collective over the world."""
    found = parts.take_stock()
    whole = [a for a, _, _ in attempts(found) if choose(rows_of(found, a), parts.world.topology.node_of)]
    return sorted({step for a, step, _ in attempts(found) if a in whole})


def bring_home(parts: Parts, step: int | None) -> Slot | None:
    """Bring the newest restorable attempt (or that of a step) into this rank's own slot.

    Collective over the world.

    Returns:
        The own slot, every byte of it verified on every rank; None where there is nothing.

    Raises:
        StepNotFound: there is no such step.
        WorldSizeChanged: it was saved by another number of ranks.
    """
    found = parts.take_stock()
    reach("restore.listed")
    while True:
        node_of, skip_stuck = parts.world.topology.node_of, parts.config.skip_stuck if step is None else 0
        choice, passed_over = choose(found, node_of, step, skip_stuck), choose(found, node_of, step)
        if choice is None:
            if step is None:
                return None
            steps = sorted({s for _, s, _ in attempts(found)}) or "none"
            raise StepNotFound("this step cannot be restored", step=step, found=f"steps in memory: {steps}")
        if choice.world_size != parts.world.size:
            raise WorldSizeChanged(
                "the checkpoint in memory was saved by another number of ranks: start with that number again, or leave "
                "it behind with another job name or `mlflash clean`",
                step=choice.step,
                expected=f"a world of {choice.world_size} ranks",
                found=f"{parts.world.size}",
            )
        bad = _verify_and_fetch(parts, found, choice)
        if not bad:
            parts.restored_from = parts.world.topology.node_names[choice.source[parts.world.rank][0]]
            parts.restores = choice.restores + 1
            if passed_over is not None and passed_over.attempt != choice.attempt and parts.world.rank == 0:
                log.warning(
                    "step %d was restored %d times and nothing newer was committed since: step %d is taken instead "
                    "(skip_stuck=%d)", passed_over.step, passed_over.restores, choice.step, parts.config.skip_stuck,
                )  # fmt: skip
            home = next(slot for slot in parts.shelf.own if _is(slot, parts.world.rank, choice.attempt))
            parts.rolled_forward = bool(parts.world.agree([int(not home.committed)])[0])
            return home
        for node, file in bad:
            found = found[(found["node"] != node) | (found["file"] != file)]


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


def _verify_and_fetch(parts: Parts, found: np.ndarray, choice: Choice) -> list[tuple[int, int]]:
    """Verify the slots of a choice and fetch those from other nodes; returns the places of the bad ones."""
    world = parts.world
    serves = _servers(parts, choice)
    slots: dict[int, Slot] = {}
    bad: list[tuple[int, int]] = []
    for rank in range(world.size):
        if serves[rank] == world.rank:
            try:
                slots[rank] = _open_verified(parts, choice, rank)
            except (CorruptSlot, FileNotFoundError) as error:
                log.warning("rank %d: this slot cannot be restored from: %s", world.rank, error)
                bad.append(choice.source[rank])
    bad = sorted(place for places in world.gather(bad) for place in places)
    if not bad:
        reach("restore.verified")
        parts.adopt(found, choice)
        reach("restore.adopted")
        bad = _fetch(parts, choice, serves, slots)
    in_use = parts.shelf.mapped()
    for slot in slots.values():
        if slot.segment is not None and slot.segment.inode not in in_use:
            slot.segment.close()
    return bad


def _servers(parts: Parts, choice: Choice) -> list[int]:
    """For each rank, who reads its slot: the rank itself where it is on its node, else one of that node, in turn."""
    topology = parts.world.topology
    serves = []
    for rank, (node, _) in enumerate(choice.source):
        here = topology.ranks_on[node]
        serves.append(rank if topology.node_of[rank] == node else here[rank % len(here)])
    return serves


def _open_verified(parts: Parts, choice: Choice, rank: int) -> Slot:
    slot = Slot(attach(parts.memory, file_name(choice.source[rank][1]), parts.shelf.mapped()))
    if not _is(slot, rank, choice.attempt):
        raise CorruptSlot("the header of a slot changed", rank=rank, step=choice.step)
    slot.verify()
    slot.manifest()
    return slot


def _is(slot: Slot, rank: int, attempt: Attempt) -> bool:
    return slot.header is not None and (slot.header.rank, slot.header.attempt) == (rank, attempt)


def _fetch(parts: Parts, choice: Choice, serves: list[int], slots: dict[int, Slot]) -> list[tuple[int, int]]:
    """Bring slots from other nodes; the receiver checks every byte once more."""
    world, shelf = parts.world, parts.shelf
    moves = [rank for rank in range(world.size) if serves[rank] != rank]
    if not moves:
        return []
    mine = [rank for rank in moves if serves[rank] == world.rank]
    for_me = world.rank in moves
    # One message per pair of ranks: a rank has one slot to fetch, and a server tells each of its ranks what comes.
    to = {rank: slots[rank].header.extents for rank in mine}  # type: ignore[union-attr]
    comes = offer(world, dict(to), [serves[world.rank]] if for_me else [])
    home: Slot | None = None
    demand = []
    if for_me:
        extents = comes[serves[world.rank]]
        home = shelf.free_slot(shelf.own)
        assert extents is not None and home is not None
        demand = [(home, extents.nbytes)]
    parts.ensure_room(demand)
    window = SlotWindow(world, world.world, home) if parts.copies.transport == "rma" else None
    exposed = None if window is None else (0, window)
    chunk = parts.config.chunk_nbytes
    work = []
    for rank in mine:
        target = None if window is None else _fixed(window, rank)
        work.append(send(world, rank, Source(slots[rank], to[rank], None), chunk, target))
    if home is not None and extents is not None:
        work.append(receive(world, serves[world.rank], home, extents, world.rank, choice.attempt, chunk, exposed))
    world.waiting_for = sorted({*mine, *([serves[world.rank]] if for_me else [])})
    arrived = world.drive(work)
    world.waiting_for = ()
    if window is not None:
        window.free()
    reach("restore.fetched")
    parts.counts["slots fetched"] += home is not None
    if home is not None:
        home.use = Use.HOLDS if arrived[-1] else Use.FREE
    failed = [choice.source[world.rank]] if home is not None and not arrived[-1] else []
    return sorted(place for places in world.gather(failed) for place in places)


def _fixed(window: SlotWindow, rank: int) -> Callable[[int], tuple[SlotWindow, int]]:
    return lambda number: (window, rank)


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
            parts.shelf.free_older(home)
            return


def heal(parts: Parts, home: Slot) -> None:
    """Make the redundancy of the restored attempt whole in its new places; then free everything else.

    Collective over the world.

    Raises:
        MemoryTooSmall, SaveFailed: on all ranks; what was there before is untouched.
    """
    world, shelf, copies = parts.world, parts.shelf, parts.copies
    header = home.header
    assert header is not None
    lacking = copies.missing(shelf, header.attempt)
    whole = world.agree([int(not lacking)])[0]
    reach("heal.begun")
    if not whole:
        _copy_again(parts, home, copies, lacking)
        reach("heal.copied")
    kept = copies.kept(shelf, header.attempt)
    shelf.keep_only([home, *kept])
    shelf.drop_spare()
    reach("heal.freed")
    # The next save shall find room.
    demand = [(slot, header.extents.nbytes) for slot in shelf.own]
    for owner, pair in shelf.inbox.items():
        sizes = [copy.header.extents.nbytes for copy in kept if copy.header is not None and copy.header.rank == owner]
        demand += [(slot, nbytes) for nbytes in sizes for slot in pair]
    parts.ensure_room(demand)
    reach("heal.done")


def _copy_again(parts: Parts, home: Slot, copies: Copies, lacking: bool) -> None:
    world, shelf = parts.world, parts.shelf
    header = home.header
    assert header is not None
    parts.counts["slots healed"] += lacking
    demand = copies.offer(shelf, header.extents if lacking else None)
    parts.ensure_room(demand, pairs=False)  # the other slot of a pair may hold the last copy of the step before
    whole = copies.protect(shelf, Source(home, header.extents, None), header.attempt)
    error: MlflashError | None = None
    if not whole:
        error = CorruptSlot("a copy did not arrive whole", rank=world.rank, node=world.node_name, step=header.step)
    try:
        world.raise_together(error)
    except MlflashError:  # where a copy failed somewhere its slot must be free for the next save
        shelf.release(header.attempt, home, False)
        raise
    shelf.release(header.attempt, home, True)
