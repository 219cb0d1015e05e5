"""The redundancy of this rank's slots: copies, parity, or both if the nodes have different numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..memory.slot import Slot
from ..memory.slot_header import Attempt
from ..memory.slot_pool import SlotPool
from ..mpi.fabric import choose_transport
from ..mpi.world import World
from ..placement.protection_groups import Placement
from ..state.layout import Extents
from .parity import Parity
from .partner_copies import PartnerCopies
from .slot_transfer import Source


class Protection:
    """Makes, finds and keeps the redundancy of this rank's slots, and its share of that of other ranks.

    Collective over the world.

    Args:
        transport: ``p2p``, ``rma`` or ``auto``.
        chunk_nbytes: bytes of a message.
        block_nbytes: bytes that have a checksum, and that are coded at a time.
    """

    def __init__(
        self, world: World, placement: Placement, transport: str, chunk_nbytes: int, block_nbytes: int, job: str
    ):
        self._world = world
        self.placement = placement
        world.form_groups(placement.connected)
        self.transport = choose_transport(world, transport)
        self._copies = PartnerCopies(world, placement, self.transport, chunk_nbytes)
        self._parity = Parity(world, placement, block_nbytes, job)
        self._parts = (self._copies, self._parity)

    @property
    def partners(self) -> tuple[int, ...]:
        return self._copies.partners

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that protect each other, as the header of a slot records them."""
        return self._parity.group or (self._world.rank, *self.partners)

    @property
    def scheme(self) -> str:
        """The scheme of this rank's slot, as its header records it."""
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

    def offer(self, pool: SlotPool, extents: Extents | None, again: bool = False) -> list[tuple[Slot, int]]:
        """Announce what this rank will send; returns the inbox slots needed for what comes, with their bytes.

        Collective over the group.

        Args:
            extents: parts of the slot to send; None sends nothing.
            again: only what `missing` found missing.
        """
        return [need for part in self._parts for need in part.offer(pool, extents, again)]

    def protect(self, pool: SlotPool, source: Source, attempt: Attempt) -> bool:
        """Exchange what was offered; return whether everything that concerns this rank arrived whole.

        Collective over the group. On return the own slot is sealed, and so is each inbox slot whose content was
        verified.
        """
        work = [operation for part in self._parts for operation in part.moves(pool, source, attempt)]
        self._world.waiting_for = sorted({rank for part in self._parts for rank in part.waiting_for})
        arrived = self._world.drive(work)
        self._world.waiting_for = ()
        source.seal()
        return all(arrived)

    def missing(self, pool: SlotPool, attempt: Attempt, forget: bool = True) -> bool:
        """Whether redundancy of this rank's slot of an attempt is missing. Collective over the group.

        Args:
            forget: unseal what is damaged; otherwise it stays, and a new file is made next to it.
        """
        lacking = [part.missing(pool, attempt, forget) for part in self._parts]
        return any(lacking)

    def is_complete(self, pool: SlotPool, attempt: Attempt) -> bool:
        """Whether this rank has all redundancy of an attempt that it has to keep, by the headers."""
        return len({slot.header.rank for slot in self.kept(pool, attempt) if slot.header}) == len(self.owners)

    def kept(self, pool: SlotPool, attempt: Attempt) -> list[Slot]:
        return [slot for part in self._parts for slot in part.kept(pool, attempt)]

    def free(self) -> None:
        self._copies.close_windows()
