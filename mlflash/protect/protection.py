"""The redundancy of this rank's slots: copies, parity, or both if the nodes have different numbers of ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..memory.slot import Attempt, Slot
from ..memory.slot_pool import SlotPool, any_intact
from ..mpi.fabric import OpenMemory, choose_transport
from ..mpi.nonblocking import Operation
from ..mpi.world import World
from ..placement.redundancy import Placement
from ..state.layout import Extents
from .parity import Parity
from .transfer import Source, offer, receive, send, slot_of, swap


class Protection:
    """Makes and keeps the redundancy of this rank's slots, and its share of others'. Collective over the world."""

    def __init__(self, world: World, placement: Placement, transport: str, job: str):
        self._world = world
        self.placement, self.partners = placement, placement.partners[world.rank]
        world.form_groups(placement.connected)
        self.transport = choose_transport(world, transport)
        self._copies = PartnerCopies(world, placement, self.transport)
        self._parity = Parity(world, placement, job)
        self._parts = (self._copies, self._parity) if self._parity.group else (self._copies,)

    @property
    def group(self) -> tuple[int, ...]:
        return self._parity.group or (self._world.rank, *self.partners)

    @property
    def scheme(self) -> str:
        if self._parity.group:
            return str(self._parity.scheme)
        return "none" if not self.partners else "copy" if len(self.partners) == 1 else f"copy:{len(self.partners)}"

    @property
    def owners(self) -> tuple[int, ...]:
        """Keys of this rank's inbox pairs: the ranks whose copies it holds; itself for its parity."""
        return (*self._copies.owners, *self._parity.owners)

    def inbox_nbytes(self, nbytes_of: Sequence[int]) -> dict[int, int]:
        return {**self._copies.inbox_nbytes(nbytes_of), **self._parity.inbox_nbytes(nbytes_of)}

    def open_windows(self, pool: SlotPool) -> None:
        self._copies.open_windows(pool)

    def close_windows(self) -> None:
        self._copies.close_windows()

    def offer(self, pool: SlotPool, extents: Extents | None, only_missing: bool = False) -> list[tuple[Slot, int]]:
        """Announce what this rank will send; returns the inbox slots needed for what comes, with their bytes.

        Collective over the group.

        Args:
            extents: parts of the slot to send; None sends nothing.
            only_missing: only what `missing` found missing.
        """
        return [need for part in self._parts for need in part.offer(pool, extents, only_missing)]

    def protect(self, pool: SlotPool, source: Source, attempt: Attempt) -> bool:
        """Exchange what was offered; whether all arrived intact. The own slot and what arrived are sealed then."""
        work = [operation for part in self._parts for operation in part.moves(pool, source, attempt)]
        self._world.waiting_for = sorted({rank for part in self._parts for rank in part.waiting_for})
        arrived = self._world.drive(work)
        self._world.waiting_for = ()
        source.seal()
        return all(arrived)

    def missing(self, pool: SlotPool, attempt: Attempt, forget: bool = True) -> bool:
        """Whether redundancy of an attempt is missing; ``forget``: unseal damaged slots. Collective over the group."""
        lacking = [part.missing(pool, attempt, forget) for part in self._parts]
        return any(lacking)

    def is_complete(self, pool: SlotPool, attempt: Attempt) -> bool:
        return len({slot.header.rank for slot in self.kept(pool, attempt) if slot.header}) == len(self.owners)

    def kept(self, pool: SlotPool, attempt: Attempt) -> list[Slot]:
        return [slot for part in self._parts for slot in part.kept(pool, attempt)]


# Copies: each slot is sent whole to partners, which are ranks on other nodes


class PartnerCopies:
    """Sends this rank's slots to its partners and receives those of the ranks it holds copies of."""

    def __init__(self, world: World, placement: Placement, transport: str):
        self._world, self._transport = world, transport
        self._owners_of = placement.owners
        self.partners = placement.partners[world.rank]
        self.owners = placement.owners[world.rank]
        number = placement.connected[world.rank]
        self._members = [rank for rank, other in enumerate(placement.connected) if other == number]
        self._most_owners = max(len(placement.owners[rank]) for rank in self._members)
        self._windows: list[list[OpenMemory]] = []
        self._sends: Sequence[int] = ()
        self._comes: dict[int, Extents] = {}
        self._lacking: Sequence[int] = ()
        self._targets: dict[int, Slot] = {}

    def inbox_nbytes(self, nbytes_of: Sequence[int]) -> dict[int, int]:
        return {owner: nbytes_of[owner] for owner in self.owners}

    def open_windows(self, pool: SlotPool) -> None:
        """Expose the inbox slots. Collective over the group; nothing happens with the transport p2p."""
        if self._transport != "rma":
            return
        for index in range(pool.copies):
            row = []
            for nth in range(self._most_owners):
                inbox = pool.inbox[self.owners[nth]][index].view if nth < len(self.owners) else None
                row.append(OpenMemory(self._world, self._world.group, inbox))
            self._windows.append(row)

    def close_windows(self) -> None:
        """Take the inbox slots back. Collective over the group; must come before a slot gets a new file."""
        for row in self._windows:
            for window in row:
                window.free()
        self._windows = []

    def offer(self, pool: SlotPool, extents: Extents | None, only_missing: bool) -> list[tuple[Slot, int]]:
        lacking = self._lacking if only_missing else self.partners
        self._sends = lacking if extents is not None else ()
        to = {partner: extents if partner in self._sends else None for partner in self.partners}
        self._comes = {q: e for q, e in offer(self._world, to, self.owners).items() if e is not None}
        self._targets = {}
        for owner in self._comes:
            slot = pool.free_slot(pool.inbox[owner])
            if slot is None:
                raise AssertionError(f"all inbox slots for rank {owner} hold something")
            self._targets[owner] = slot
        return [(self._targets[owner], e.nbytes) for owner, e in self._comes.items()]

    def moves(self, pool: SlotPool, source: Source, attempt: Attempt) -> list[Operation]:
        """Exchange what was offered, as operations whose result is whether a slot arrived intact."""
        work = []
        for partner in self._sends:
            window = functools.partial(self._window_at, partner) if self._transport == "rma" else None
            work.append(send(self._world, partner, source, window))
        for owner, extents in self._comes.items():
            slot = self._targets[owner]
            index = pool.inbox[owner].index(slot)
            exposed = (index, self._windows[index][self.owners.index(owner)]) if self._transport == "rma" else None
            work.append(receive(self._world, owner, slot, extents, slot_of(owner, attempt), exposed))
        return work

    @property
    def waiting_for(self) -> list[int]:
        return [*self._comes, *self._sends]

    def _window_at(self, partner: int, index: int) -> tuple[OpenMemory, int]:
        nth = self._owners_of[partner].index(self._world.rank)
        return self._windows[index][nth], self._members.index(partner)

    def missing(self, pool: SlotPool, attempt: Attempt, forget: bool = True) -> bool:
        """Whether a partner lacks a copy of this rank's slot: each checks its own, and ``forget`` unseals bad ones."""
        what = f"rank {self._world.rank}: a copy"
        intact = {
            owner: any_intact(_copies_of(pool, owner, attempt), Slot.verify, what, forget) for owner in self.owners
        }
        have = {owner: (int(held), 0, 0) for owner, held in intact.items()}
        answer = swap(self._world, have, self.partners)
        self._lacking = [partner for partner, (held, _, _) in answer.items() if not held]
        return bool(self._lacking)

    def kept(self, pool: SlotPool, attempt: Attempt) -> list[Slot]:
        return [slot for owner in self.owners for slot in _copies_of(pool, owner, attempt)]


def _copies_of(pool: SlotPool, owner: int, attempt: Attempt) -> list[Slot]:
    return [slot for slot in pool.inbox[owner] if slot.header is not None and slot_of(owner, attempt)(slot.header)]
