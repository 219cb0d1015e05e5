"""Redundancy scheme `copy`: each slot is sent whole to the partner, a rank on another node."""

from __future__ import annotations

import logging

from .comm import World, has_rdma
from .config import Config
from .errors import CorruptSlot
from .header import Attempt
from .layout import Extents
from .shelf import Shelf
from .slot import Slot, Use
from .topology import groups, owners, partners
from .transfer import Source, offer, receive, send, swap
from .window import SlotWindow

log = logging.getLogger("mlflash")


class Copies:
    """Sends this rank's slots to its partner and receives those of the ranks it holds copies of.

    Collective over the world.

    Args:
        world: the communicators.
        config: scheme, transport and sizes.
    """

    def __init__(self, world: World, config: Config):
        self._world = world
        self._chunk_nbytes = config.chunk_nbytes
        everyone_alone = (-1,) * world.size
        partner_of = partners(world.topology) if config.redundancy != "none" else everyone_alone
        self.owners_of = owners(partner_of)
        self.partner = partner_of[world.rank]
        self.owners = self.owners_of[world.rank]
        group_of = groups(partner_of)
        self._members = [rank for rank, group in enumerate(group_of) if group == group_of[world.rank]]
        self._most_owners = max(len(self.owners_of[rank]) for rank in self._members)
        world.form_groups(group_of)
        self.transport = _choose_transport(world, config)
        self._windows: list[list[SlotWindow]] = []
        self._targets: dict[int, Slot] = {}

    @property
    def group(self) -> tuple[int, ...]:
        """This rank and its partner, as headers record them."""
        return (self._world.rank,) if self.partner < 0 else (self._world.rank, self.partner)

    def open_windows(self, shelf: Shelf) -> None:
        """Expose the inbox slots. Collective over the group; nothing happens with the transport p2p."""
        if self.transport != "rma" or len(self._members) == 1:
            return
        for index in (0, 1):
            row = []
            for nth in range(self._most_owners):
                slot = shelf.inbox[self.owners[nth]][index] if nth < len(self.owners) else None
                row.append(SlotWindow(self._world, self._world.group, slot))
            self._windows.append(row)

    def close_windows(self) -> None:
        """Take the inbox slots back. Collective over the group; must come before a slot gets a new file."""
        for row in self._windows:
            for window in row:
                window.free()
        self._windows = []

    def offer(self, shelf: Shelf, extents: Extents | None) -> list[tuple[Slot, int]]:
        """Announce what this rank will send; returns the inbox slots needed for what comes, with their bytes.

        Args:
            extents: parts of the slot to send; None sends nothing.
        """
        to = {self.partner: extents} if self.partner >= 0 else {}
        self._sends = extents is not None and self.partner >= 0
        self._comes = {q: e for q, e in offer(self._world, to, self.owners).items() if e is not None}
        self._targets = {}
        for owner in self._comes:
            slot = shelf.free_slot(shelf.inbox[owner])
            if slot is None:
                raise AssertionError(f"both inbox slots for rank {owner} hold something")
            self._targets[owner] = slot
        return [(self._targets[owner], e.nbytes) for owner, e in self._comes.items()]

    def protect(self, shelf: Shelf, source: Source, attempt: Attempt) -> bool:
        """Exchange what was offered; whether this rank's slot arrived whole and all that came was whole.

        On return the own slot is sealed, and so is each inbox slot whose copy was verified.
        """
        work = []
        if self._sends:
            window = self._window_at if self.transport == "rma" else None
            work.append(send(self._world, self.partner, source, self._chunk_nbytes, window))
        for owner, extents in self._comes.items():
            slot = self._targets[owner]
            index = shelf.inbox[owner].index(slot)
            exposed = (index, self._windows[index][self.owners.index(owner)]) if self.transport == "rma" else None
            work.append(receive(self._world, owner, slot, extents, owner, attempt, self._chunk_nbytes, exposed))
        self._world.waiting_for = sorted({*self._comes, *([self.partner] if self._sends else [])})
        arrived = self._world.drive(work)
        self._world.waiting_for = ()
        source.seal()
        return all(arrived)

    def _window_at(self, index: int) -> tuple[SlotWindow, int]:
        nth = self.owners_of[self.partner].index(self._world.rank)
        return self._windows[index][nth], self._members.index(self.partner)

    def missing(self, shelf: Shelf, attempt: Attempt) -> bool:
        """Whether the partner lacks a whole copy of this rank's slot of an attempt. Collective over the group.

        Each rank checks every byte of the copies it holds; a bad one is forgotten.
        """
        have = {owner: (int(self._holds(shelf, owner, attempt)), 0, 0) for owner in self.owners}
        answer = swap(self._world, have, [self.partner] if self.partner >= 0 else [])
        return any(not held for held, _, _ in answer.values())

    def kept(self, shelf: Shelf, attempt: Attempt) -> list[Slot]:
        """The inbox slots that hold an attempt for the ranks they belong to."""
        return [slot for owner in self.owners for slot in _copies_of(shelf, owner, attempt)]

    def _holds(self, shelf: Shelf, owner: int, attempt: Attempt) -> bool:
        for slot in _copies_of(shelf, owner, attempt):
            try:
                slot.verify()
                return True
            except CorruptSlot as error:
                log.warning("rank %d: a copy is damaged and will be made again: %s", self._world.rank, error)
                slot.unseal()
                slot.use = Use.FREE
        return False


def _copies_of(shelf: Shelf, owner: int, attempt: Attempt) -> list[Slot]:
    wanted = (owner, attempt)
    return [s for s in shelf.inbox[owner] if s.header is not None and (s.header.rank, s.header.attempt) == wanted]


def _choose_transport(world: World, config: Config) -> str:
    """One-sided where the fabric is RDMA; else two-sided, which was as fast or faster (benchmarks/, facts in
    ARCHITECTURE.md) and makes progress on one host while the main thread computes.
    """
    if config.transport != "auto":
        return config.transport
    rdma = not world.emulated and len(world.topology.node_names) > 1 and has_rdma()
    return "rma" if world.agree([int(rdma)])[0] else "p2p"
