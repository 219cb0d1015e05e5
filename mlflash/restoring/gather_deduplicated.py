"""Shares of what several ranks hold alike → every node that needs them; read like a rank's own slot.

A node needs all shares of each set that one of its ranks belongs to. The ranks of the node verify, in parallel, the
shares that are there. The others are fetched from any node that has them, and stay until the next commit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.inventory import Place, file_number
from ..memory.slot import Slot
from ..memory.slot_header import Attempt, Header, Kind
from ..redundancy.deduplication import Share, cuts
from ..redundancy.rank_checkpoint import ShareFiles
from ..startup.choose_checkpoint import Choice
from ..startup.context import Context
from ..state.manifest import Shared
from .fetch_slots import fetch

log = logging.getLogger("mlflash")


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
        """Whether the share has to be fetched from another node."""
        return self.place[0] != self.node


def gather_shares(
    context: Context, choice: Choice, slots: Mapping[int, Slot], checked: bool = True
) -> tuple[ShareFiles, list[Place]]:
    """Bring the shares that slots need to the nodes where these slots are read.

    Collective over the world.

    Args:
        choice: what is restored.
        slots: the verified slots that this rank has or reads, by the rank that they belong to.
        checked: verify every byte of the shares, not only their headers and tables.

    Returns:
        Where the shares are; and the files to do without, if that failed.
    """
    mine = {rank: shared for rank, slot in slots.items() if (shared := slot.manifest().shared) is not None}
    nothing = context.world.agree([int(not mine)])[0]
    files, bad = ({}, []) if nothing else _gather_shares(context, choice, mine, checked)
    reach("restore.gathered")
    return files, bad


def _gather_shares(
    context: Context, choice: Choice, mine: Mapping[int, Shared], checked: bool
) -> tuple[ShareFiles, list[Place]]:
    """Do that; see `gather_shares`.

    Args:
        mine: what is shared in the slots that this rank has or reads.
    """
    needs = context.world.gather(mine)
    lacking = {rank for theirs in needs for rank, shared in theirs.items() if not _all_there(choice, shared)}
    if lacking:  # their slots exist, but shares that they need do not: this attempt is incomplete
        return {}, sorted({place for rank in lacking for place in _files_of(choice, rank)})
    errands = list(_errands(context, choice, [[*theirs.values()] for theirs in needs]))
    bad = _verify(context, choice.attempt, errands, checked)
    files = {(e.node, e.share): e.place[1] for e in errands if not e.comes}
    pending = [] if bad else [e for e in errands if e.comes]
    while pending and not bad:
        now = list({errand.rank: errand for errand in reversed(pending)}.values())  # the first one of each rank
        pending = [errand for errand in pending if errand not in now]
        arrived, failed = _fetch_some(context, choice.attempt, now)
        files |= arrived
        bad = failed
    return files, bad


def _all_there(choice: Choice, shared: Shared) -> bool:
    return all((shared.by, number) in choice.shares for number in range(shared.shares))


def _files_of(choice: Choice, rank: int) -> list[Place]:
    place, group = choice.source[rank], choice.rebuilt.get(rank)
    return [place] if place is not None else [p for p in (group.files if group else ()) if p is not None]


def _errands(context: Context, choice: Choice, needs: Sequence[Sequence[Shared]]) -> Iterator[_Errand]:
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


def _verify(context: Context, attempt: Attempt, errands: list[_Errand], checked: bool) -> list[Place]:
    """Verify the files that are here, every byte if asked; return those that cannot be used."""
    bad = []
    for errand in errands:
        if errand.rank == context.world.rank and not errand.comes:
            try:
                slot = _open(context, attempt, errand)
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


def _open(context: Context, attempt: Attempt, errand: _Errand) -> Slot:
    slot = context.pool.open(errand.place[1])
    if slot.header is None or not _is(attempt, errand, slot.header):
        raise CorruptSlot("the header of a share changed", rank=errand.rank)
    return slot


def _is(attempt: Attempt, errand: _Errand, header: Header) -> bool:
    found = (header.kind, header.attempt, (header.shared_by, header.share), header.extents.payload_nbytes)
    return found == (Kind.SHARE, attempt, errand.share, errand.nbytes)


def _fetch_some(context: Context, attempt: Attempt, errands: list[_Errand]
                ) -> tuple[dict[tuple[int, Share], int], list[Place]]:  # fmt: skip
    """Fetch one share each for some ranks; return the files where they are now, and those that could not be used."""
    world, pool = context.world, context.pool
    mine = next((errand for errand in errands if errand.rank == world.rank), None)
    serves: dict[int, Slot] = {}
    bad = []
    for errand in errands:
        if errand.server == world.rank:
            try:
                serves[errand.rank] = _open(context, attempt, errand)
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
    is_wanted = functools.partial(_is, attempt, mine) if mine is not None else lambda header: False
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
