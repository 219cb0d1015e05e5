"""Shares of what several ranks hold alike → every node that needs them; read like a rank's own.

A node needs all shares of each set that a rank of it belongs to. Those that are there are verified by its ranks, side
by side; those that are not are fetched from any node that has them, and stay until the next commit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.inventory import Choice, Place, file_name, file_number
from ..memory.segment import attach
from ..memory.slot import Slot
from ..memory.slot_header import Attempt, Header, Kind
from ..redundancy.shares import Share, cuts
from ..runtime.parts import Parts
from ..state.leaves import Entry
from ..state.manifest import Manifest, Shared
from ..state.rebuild import Read
from .fetch import fetch

log = logging.getLogger("mlflash")

Files = dict[tuple[int, Share], int]
"""By node and share, the number of its file there."""


@dataclasses.dataclass
class Home:
    """A rank's checkpoint to be read: its slot, and the shares of what it holds like others.

    Attributes:
        slot: verified.
        manifest: of the slot.
        shares: files of this node, verified; empty where nothing is shared.
        files: where those of all nodes are.
    """

    slot: Slot
    manifest: Manifest
    shares: list[Slot]
    files: Files

    @property
    def header(self) -> Header:
        """Of the slot."""
        assert self.slot.header is not None
        return self.slot.header

    def reader(self) -> Read:
        """Give the bytes of entries: views, or copies where shares are cut; not for longer than the files are open."""
        own, shared = self.slot.reader(), self.manifest.shared
        if shared is None:
            return own
        behind = self.header.extents.payload_nbytes
        bounds = cuts(shared.nbytes, shared.shares)
        payloads = [share.payload(share.header.extents) for share in self.shares if share.header is not None]

        def read(entry: Entry) -> np.ndarray:
            first, last = entry.start - behind, entry.start - behind + entry.nbytes
            if first < 0 or not entry.nbytes:
                return own(entry)
            found = [
                payload[max(first, low) - low : min(last, high) - low]
                for payload, (low, high) in zip(payloads, itertools.pairwise(bounds), strict=True)
                if max(first, low) < min(last, high)
            ]
            return found[0] if len(found) == 1 else np.concatenate(found)

        return read


@dataclasses.dataclass(frozen=True)
class _Errand:
    """What one rank does for its node: look at the file of a share, or fetch it."""

    share: Share
    nbytes: int
    rank: int
    node: int
    place: Place
    server: int

    @property
    def comes(self) -> bool:
        """Whether it has to come from another node."""
        return self.place[0] != self.node


def reunite(parts: Parts, choice: Choice, slots: Mapping[int, Slot], checked: bool = True) -> tuple[Files, list[Place]]:
    """Bring the shares that slots need to the nodes where these are read.

    Collective over the world.

    Args:
        choice: what is restored.
        slots: those that this rank has or reads, verified, by the rank whose they are.
        checked: verify every byte of the shares, not only their headers and tables.

    Returns:
        Where the shares are; and the files to do without, where that failed.
    """
    mine = {rank: shared for rank, slot in slots.items() if (shared := slot.manifest().shared) is not None}
    nothing = parts.world.agree([int(not mine)])[0]
    files, bad = ({}, []) if nothing else _reunite(parts, choice, mine, checked)
    reach("restore.reunited")
    return files, bad


def _reunite(parts: Parts, choice: Choice, mine: Mapping[int, Shared], checked: bool) -> tuple[Files, list[Place]]:
    """Do that; see `reunite`.

    Args:
        mine: what is shared of the slots that this rank has or reads.
    """
    needs = parts.world.gather(mine)
    lacking = {rank for theirs in needs for rank, shared in theirs.items() if not _all_there(choice, shared)}
    if lacking:  # their slots came back, but nothing has what they need: this attempt is not whole
        return {}, sorted({place for rank in lacking for place in _files_of(choice, rank)})
    errands = list(_errands(parts, choice, [[*theirs.values()] for theirs in needs]))
    bad = _verify(parts, choice.attempt, errands, checked)
    files = {(e.node, e.share): e.place[1] for e in errands if not e.comes}
    pending = [] if bad else [e for e in errands if e.comes]
    while pending and not bad:
        now = list({errand.rank: errand for errand in reversed(pending)}.values())  # of each rank, the first
        pending = [errand for errand in pending if errand not in now]
        arrived, failed = _fetch_some(parts, choice.attempt, now)
        files |= arrived
        bad = failed
    return files, bad


def open_home(parts: Parts, slot: Slot, files: Files) -> Home:
    """Put a slot and its shares on this node together, to be read; the caller unmaps them. Not collective."""
    home = Home(slot, slot.manifest(), [], files)
    shared = home.manifest.shared
    for number in range(0 if shared is None else shared.shares):
        assert shared is not None
        name = file_name(files[parts.world.node_index, (shared.by, number)])
        home.shares.append(Slot(attach(parts.memory, name, parts.shelf.mapped())))
    return home


def _all_there(choice: Choice, shared: Shared) -> bool:
    return all((shared.by, number) in choice.shares for number in range(shared.shares))


def _files_of(choice: Choice, rank: int) -> list[Place]:
    place, group = choice.source[rank], choice.rebuilt.get(rank)
    return [place] if place is not None else [p for p in (group.files if group else ()) if p is not None]


def _errands(parts: Parts, choice: Choice, needs: Sequence[Sequence[Shared]]) -> Iterator[_Errand]:
    """Who does what on each node, where each rank needs these shares; the same list on all ranks."""
    topology = parts.world.topology
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
            whose = next((rank for rank in ranks if parts.shares.get(rank) == share), ranks[nth % len(ranks)])
            yield _Errand(share, nbytes, whose, node, place, topology.reader(whose, place[0]))


def _verify(parts: Parts, attempt: Attempt, errands: list[_Errand], checked: bool) -> list[Place]:
    """Verify the files that are here, every byte where asked; returns those that cannot be used."""
    bad = []
    for errand in errands:
        if errand.rank == parts.world.rank and not errand.comes:
            try:
                slot = _open(parts, attempt, errand)
                try:
                    if checked:
                        slot.verify(parts.crew)
                    else:
                        slot.verify_table()
                finally:
                    parts.shelf.unmap_others([slot])
            except (CorruptSlot, OSError) as error:
                log.warning("rank %d: this share cannot be restored from: %s", parts.world.rank, error)
                bad.append(errand.place)
    return sorted(place for places in parts.world.gather(bad) for place in places)


def _open(parts: Parts, attempt: Attempt, errand: _Errand) -> Slot:
    slot = Slot(attach(parts.memory, file_name(errand.place[1]), parts.shelf.mapped()))
    if slot.header is None or not _is(attempt, errand, slot.header):
        raise CorruptSlot("the header of a share changed", rank=errand.rank)
    return slot


def _is(attempt: Attempt, errand: _Errand, header: Header) -> bool:
    found = (header.kind, header.attempt, (header.shared_by, header.share), header.extents.payload_nbytes)
    return found == (Kind.SHARE, attempt, errand.share, errand.nbytes)


def _fetch_some(parts: Parts, attempt: Attempt, errands: list[_Errand]
                ) -> tuple[dict[tuple[int, Share], int], list[Place]]:  # fmt: skip
    """Fetch a share each, for some ranks; returns the files where they are now, and those that could not be used."""
    world, shelf = parts.world, parts.shelf
    mine = next((errand for errand in errands if errand.rank == world.rank), None)
    serves: dict[int, Slot] = {}
    bad = []
    for errand in errands:
        if errand.server == world.rank:
            try:
                serves[errand.rank] = _open(parts, attempt, errand)
            except (CorruptSlot, OSError):
                bad.append(errand.place)
    bad = sorted(place for places in world.gather(bad) for place in places)
    if bad:
        shelf.unmap_others(serves.values())
        return {}, bad
    target = None
    is_mine = mine is not None and parts.shares.get(world.rank) == mine.share
    if mine is not None:
        target = (shelf.free_slot(shelf.shares) if is_mine else None) or Slot()
    is_wanted = functools.partial(_is, attempt, mine) if mine is not None else lambda header: False
    whole = fetch(parts, serves, None if mine is None else mine.server, target, is_wanted)
    parts.journal.counts["shares fetched"] += mine is not None
    shelf.unmap_others(serves.values())
    told = None
    if mine is not None and target is not None:
        told = (mine.share, file_number(target.name), whole, mine.place)
        if not any(target is slot for slot in shelf.shares):
            shelf.keep_for_now(target)
            shelf.unmap_others([target])
    arrived = {}
    for rank, news in enumerate(world.gather(told)):
        if news is not None:
            share, number, good, place = news
            arrived[world.topology.node_of[rank], share] = number
            bad += [] if good else [place]
    return arrived, bad
