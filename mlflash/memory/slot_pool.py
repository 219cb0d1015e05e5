"""The slots of this rank: two of its own, two for its share, two for each copy that it holds, two for its parity.

There are two of each because the last committed one is never written: a save goes into the other one. If steps are
certified, there are one or two more of each (`config.slots_of`). If checkpoints are drained, there is one more own one,
because reading one may take long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

from ..errors import CorruptSlot
from . import shared_memory_segment
from .disk_slot import Disk, DiskSlot
from .inventory import Inventory
from .node_directory import NodeDirectory, file_name, file_number, is_on_disk
from .own_slots import SlotFile, SlotId, with_ids
from .slot import Attempt, Header, Kind, Slot, Use, close_others, leave_behind, oldest_free, remove_file

log = logging.getLogger("mlflash")


class SlotPool:
    """This rank's slots, in its courier.

    The trainer leases own slots that are free, which are busy then. It may ask for them at any time, on a thread of its
    own; everything else is done by the thread of the jobs.

    Args:
        owners: the ranks whose copies this rank holds, and itself if it holds parity.
        slots: number of slots for each copy.
        own: number of slots of its own in memory; if checkpoints are drained, one of them may be read for long.
        disk: where copies and parity are; None: in memory.
        kept: number of slots of its own on the disk: there steps are kept besides the newest, and not in memory.
    """

    def __init__(self, memory: NodeDirectory, owners: Sequence[int], slots: int = 2, own: int = 2,
                 disk: Disk | None = None, kept: int = 0):  # fmt: skip
        self._memory, self.copies, self._disk = memory, slots, disk
        self.own = [Slot() for _ in range(own)]
        self.shares = [Slot() for _ in range(own)]  # without files if nothing is shared
        self.inbox = {owner: [self._on_disk() for _ in range(slots)] for owner in owners}
        # what this rank keeps of its own on the disk: states, shares
        self.kept = [self._on_disk() for _ in range(kept if disk is not None else 0)]
        self.kept_shares = [self._on_disk() for _ in self.kept]
        self._rejected: list[Slot] = []
        self.copied: set[int] = set()  # files of this node that were copied from a disk for a restore
        self._spare: set[int] = set()  # files to delete as soon as nothing can need them
        self._needed: set[int] = set()  # files to delete once a newer step is committed
        self._stale: set[int] = set()  # those of `_spare` that do not hold the restored attempt
        self.aside: set[int] = set()  # files of this node that are not touched until a newer step is committed
        # return the attempts that are held in addition to the newest, and those of them that the disk has
        self.older: Callable[[], Collection[Attempt]] = lambda: ()
        self.history: Callable[[], Collection[Attempt]] = lambda: ()
        self._reported: dict[SlotId, tuple[int, int]] = {}  # inodes and sizes of the files that the trainer knows
        self._taking = threading.Lock()  # held to take a free slot, or to make one free
        self._is_exchanging = False  # whether slots get other files now, so that none is leased
        self._version = 0  # of what the trainer was told last about files

    def _on_disk(self) -> Slot:
        """A new slot for what goes to the disk, if there is one."""
        return DiskSlot(self._disk) if self._disk is not None and self.has_disk else Slot()

    @property
    def has_disk(self) -> bool:
        """Whether copies and parity go to a disk."""
        return self._disk is not None and not self._disk.problem

    def saved(self, begun_s: float) -> None:
        """Note that a save has committed that began then (time.perf_counter)."""
        if self._disk is not None:
            self._disk.saved(begun_s)

    @property
    def keeps(self) -> bool:
        """Whether this rank's own state and share can be kept on a disk."""
        return bool(self.kept) and self.has_disk

    def all(self) -> list[Slot]:
        return [*self.own, *self.shares, *self._beside()]

    def _beside(self) -> list[Slot]:
        """What is neither a slot of the trainer nor in its hands: copies, parity, and what is kept."""
        return [slot for pair in (*self.inbox.values(), self.kept, self.kept_shares) for slot in pair]

    @property
    def nbytes(self) -> int:
        return sum(slot.segment.nbytes for slot in self.all() if slot.segment is not None)

    def adopt(self, files: AssignedFiles, chosen: Attempt | None, trusted: Container[int], spare: Sequence[int],
              needed: Sequence[int] = ()) -> None:  # fmt: skip
        """Take over files that an earlier process left.

        Args:
            trusted: numbers of this node's files that hold it; others that claim to hold it were found damaged.
            spare: files of this node that nobody needs, to be deleted by `drop_spare`.
            needed: files of this node that nobody will write, but which the attempt needs until a newer one is
                committed.
        """
        before = self.mapped()
        for slot in self.all():
            if isinstance(slot, DiskSlot):
                slot.unmap()
        self._rejected = []
        for pair, numbers in [
            (self.own, files.own),
            (self.shares, files.share),
            *((self.inbox[q], files.inbox[q]) for q in self.inbox),
            (self.kept, files.kept),
            (self.kept_shares, files.kept_share),
        ]:
            for index, number in enumerate(numbers):
                is_own = pair is self.own or pair is self.shares
                pair[index] = self._attach(number, before) or (Slot() if is_own else self._on_disk())
                self._judge(pair[index], chosen, number in trusted)
        for inode, mapping in before.items():
            if inode not in self.mapped():
                mapping.close()
        self._needed = set(needed)
        self._spare, self._stale = set(spare), {number for number in spare if number not in trusted}
        shared_memory_segment.prefault_in_background([s.segment for s in self.all() if s.segment is not None])

    def mapped(self) -> dict[int, shared_memory_segment.Segment]:
        return {slot.segment.inode: slot.segment for slot in self.all() if slot.segment is not None}

    def open(self, file: int, mapped: Mapping[int, shared_memory_segment.Segment] | None = None) -> Slot:
        """Map a slot file of this node for reading, until `unmap_others`. Raises CorruptSlot, UnsafePath or OSError."""
        if is_on_disk(file):
            return DiskSlot(self._disk or Disk(self._memory), file_name(file))
        known = {**(mapped or {}), **self.mapped()}
        return Slot(shared_memory_segment.attach(self._memory, file_name(file), duplicated=known))

    def copy_to_memory(self, number: int) -> int:
        """Copy a slot file from the disk to memory, as it is; return the number of the new one.

        Raises MemoryTooSmall if memory has no room.
        """
        source = self.open(number)
        assert isinstance(source, DiskSlot)
        segment = shared_memory_segment.create(self._memory, source.nbytes)
        source.read_into(segment.view)
        source.unmap()
        segment.close()
        return file_number(segment.name)

    def unmap_others(self, slots: Iterable[Slot]) -> None:
        close_others(slots, self.all())

    def _judge(self, slot: Slot, chosen: Attempt | None, trusted: bool) -> None:
        if slot.header is not None and slot.header.attempt == chosen:
            if trusted:
                slot.use = Use.HOLDS
            else:  # erased as soon as the attempt is complete elsewhere
                slot.header = None
                self._rejected.append(slot)
        elif self._is_older(slot):  # not verified here, but when it is needed
            slot.use = Use.HOLDS

    def _attach(self, number: int | None, mapped: dict[int, shared_memory_segment.Segment]) -> Slot | None:
        if number is None:
            return None
        if is_on_disk(number):
            return None if self._disk is None else DiskSlot(self._disk, file_name(number))
        try:
            return Slot(shared_memory_segment.attach(self._memory, file_name(number), mapped))
        except (CorruptSlot, FileNotFoundError):
            self._memory.remove(file_name(number))
        except OSError as error:  # not ours or not usable: this rank must not fail alone
            log.warning("%s is passed over: %s", file_name(number), error)
        return None

    def _is_older(self, slot: Slot) -> bool:
        return self._is_held_in(slot, self.older())

    def _is_held_in(self, slot: Slot, held: Collection[Attempt]) -> bool:
        """Whether a slot holds one of some attempts, and must."""
        if slot.header is None or slot.header.attempt not in held:
            return False
        is_in_memory = any(slot is own for own in (*self.own, *self.shares))
        return not (self.kept and is_in_memory and slot.header.attempt in self.history())

    # Leases of own slots

    def _own(self) -> list[tuple[SlotId, Slot]]:
        return with_ids(self.own, self.shares)

    def lease(self, number: int, leave: bool = False, lent: Collection[int] = ()) -> list[SlotFile]:
        """Lease a free slot and one for a share to the trainer; nothing if none are free now. Any thread.

        Args:
            number: of the lease, which has no other one.
            leave: leave files to views that this rank's trainer has given, instead of waiting for the end of these.
            lent: inodes of the files that it has views of.

        Returns:
            The files of the two slots, which may be too small.
        """
        may_leave: Callable[[shared_memory_segment.Segment], bool] = lambda file: leave or file.inode not in lent
        with self._taking:
            if self._is_exchanging:
                return []
            for _, slot in self._own():
                if slot.use is Use.FREE and slot.is_gone:
                    slot.unmap()
            kinds = self.own, self.shares
            chosen = [oldest_free(slots) or leave_behind(self._memory, slots, may_leave) for slots in kinds]
            pair = [slot for slot in chosen if slot is not None]
            if len(pair) < 2:
                return []
            for slot in pair:
                slot.lease, slot.use = number, Use.BUSY
            return self._files_of(number)

    def leased(self, number: int) -> list[Slot]:
        """The slots of a lease: one for a state, one for a share; nothing if it has ended."""
        return [slot for _, slot in self._own() if number and slot.lease == number]

    def files_of(self, number: int) -> list[SlotFile]:
        """The files of the slots of a lease, as they are now."""
        with self._taking:
            return self._files_of(number)

    def _files_of(self, number: int) -> list[SlotFile]:
        return [self._report(name, slot) for name, slot in self._own() if slot.lease == number]

    def end_lease(self, number: int, given_up: Collection[int] = ()) -> None:
        """Make the slots of a lease free again. Any thread.

        ``given_up``: inodes of files that are left to a device which still writes to them.
        """
        with self._taking:
            for slot in self.leased(number):
                if slot.inode and slot.inode in given_up:
                    remove_file(self._memory, slot)
                    slot.unmap()
                slot.lease, slot.use = 0, Use.FREE

    def _report(self, name: SlotId, slot: Slot) -> SlotFile:
        self._reported[name], self._version = (slot.inode, slot.view.nbytes), self._version + 1
        number = file_number(slot.name) if slot.inode else None
        return SlotFile(name, number, slot.inode, slot.view.nbytes, self._version)

    def news(self) -> list[SlotFile]:
        """The files of own slots that the trainer does not know yet."""
        with self._taking:
            return [self._report(name, slot) for name, slot in self._own()
                    if self._reported.get(name, (0, 0)) != (slot.inode, slot.view.nbytes)]  # fmt: skip

    def exchange(self) -> None:
        """Lease no slot until `end_exchange`: they get other files, or what is free in them becomes needed."""
        with self._taking:
            self._is_exchanging = True

    def end_exchange(self) -> None:
        self._is_exchanging = False

    @property
    def has_free(self) -> bool:
        """Whether each kind of own slots has one that is free, though it may have views."""
        return all(any(slot.use is Use.FREE for slot in slots) for slots in (self.own, self.shares))

    def drained(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.drains = False

    def free_slot(self, pair: list[Slot]) -> Slot | None:
        """A slot that may be written, the oldest one. If only files with views are left, its file is left to them."""
        if self._disk is not None and self._disk.problem:
            for number, slot in enumerate(pair):
                if isinstance(slot, DiskSlot) and slot.use is Use.FREE:
                    slot.unmap()
                    pair[number] = Slot()
        return oldest_free(pair) or leave_behind(self._memory, pair, lambda segment: True)

    @contextlib.contextmanager
    def reserved(self, demand: Sequence[tuple[Slot, int]]) -> Iterator[list[Slot]]:
        """Keep saves from taking the free ones of some slots while their files are replaced; yields these."""
        with self._taking:
            taken = [slot for slot, _ in demand if slot.is_free]
            for slot in taken:
                slot.use = Use.BUSY
        try:
            yield taken
        finally:
            for slot in taken:
                slot.use = Use.FREE

    def release(self, attempt: Attempt, taken: Sequence[Slot], committed: bool,
                held: Collection[Attempt] | None = None) -> None:  # fmt: skip
        """End an attempt.

        If it was committed, slots hold what must be held and the others are free. If it failed, its slots are free.

        Args:
            taken: the slots it was staged into; the others may already be busy with the next save.
            held: the attempts that must be held once it is committed; None: this one, and older ones.
        """
        for slot in [*taken, *self._beside()]:
            if slot.use is Use.BUSY:
                slot.lease, slot.use = 0, Use.HOLDS if committed else Use.FREE
        if committed:
            self.hold_only({attempt, *self.older()} if held is None else held)

    def hold_only(self, held: Collection[Attempt]) -> None:
        for slot in self.all():
            if slot.use is Use.HOLDS and not self._is_held_in(slot, held):
                slot.use = Use.FREE

    def holding(self, attempt: Attempt) -> list[Slot]:
        return [slot for slot in self.all() if slot.header is not None and slot.header.attempt == attempt]

    def shares_of(self, attempt: Attempt) -> list[Slot]:
        """This rank's share of an attempt, in memory."""
        return [slot for slot in self.shares if slot.header is not None and slot.header.attempt == attempt]

    def kept_of(self, attempt: Attempt) -> list[Slot]:
        """What this rank has of its own on the disk."""
        return [slot for slot in (*self.kept, *self.kept_shares) if slot.header and slot.header.attempt == attempt]

    def is_kept(self, header: Header) -> bool:
        """Whether the disk has, as this rank's own, what a slot or share with this header has."""
        what = header.kind, header.share, header.shared_by
        kept = (slot.header for slot in self.kept_of(header.attempt))
        return any(found is not None and (found.kind, found.share, found.shared_by) == what for found in kept)

    def free_kept(self, kind: Kind) -> Slot | None:
        """A slot on the disk that may be written, for this rank's own; if need be, one of two that hold the same."""
        ring = self.kept_shares if kind is Kind.SHARE else self.kept
        seen: set[int] = set()
        for slot in ring:
            if slot.generation in seen:
                slot.use = Use.FREE
            seen.add(slot.generation)
        return self.free_slot(ring)

    def keep_only(self, slots: Sequence[Slot]) -> None:
        """Free every slot except these, and those of older attempts; unseal those found damaged.

        These have all of an attempt, whose redundancy is complete in its new places.
        """
        older = {*self.older()} - {slot.header.attempt for slot in slots if slot.header is not None}
        if self._rejected:
            self.exchange()
        for slot in self._rejected:
            if slot.use is Use.FREE:
                slot.unseal()
                slot.use = Use.FREE
        self._rejected = []
        for slot in self.all():
            if slot.use is Use.HOLDS and not self._is_held_in(slot, older) and not any(slot is o for o in slots):
                slot.use = Use.FREE

    def hold_older(self) -> None:
        """Keep saves from writing what the own slots hold in addition to the restored step, until `free_older`."""
        self.exchange()
        for slot in (*self.own, *self.shares):
            if slot.use is Use.FREE and slot.header is not None:
                slot.use = Use.HOLDS

    def free_older(self, restored: Attempt) -> None:
        """Let saves write the own slots that do not hold the restored attempt."""
        for slot in (*self.own, *self.shares):
            is_restored = slot.header is not None and slot.header.attempt == restored
            if slot.use is Use.HOLDS and not is_restored and not self._is_older(slot):
                slot.use = Use.FREE

    def keep_for_now(self, slot: Slot) -> None:
        self._needed.add(file_number(slot.name))

    def drop_spare(self, committed: bool = False) -> None:
        """Delete the files that nobody needs; once a newer step is ``committed``, also those kept until then."""
        self._drop(self._spare | self._needed if committed else self._spare)
        if committed:
            self.aside.clear()

    def drop_aside(self) -> None:
        """Delete the files that were left aside. Not collective: the rank that keeps them deletes them."""
        self._drop(self._needed & self.aside)
        self.aside.clear()

    def drop_stale(self) -> None:
        """Delete those of them that hold only older attempts, so that reprotecting has room."""
        self._drop(self._stale)

    def _drop(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            self._memory.remove(file_name(number))
        self._spare, self._stale, self._needed = self._spare - numbers, self._stale - numbers, self._needed - numbers

    def close(self) -> None:
        for slot in self.all():
            unmap(slot)


def any_intact(slots: Iterable[Slot], verify: Callable[[Slot], object], what: str, forget: bool = True) -> bool:
    """Whether one of some slots that hold the same is intact; with ``forget``, damaged ones before it are unsealed."""
    for slot in slots:
        try:
            verify(slot)
            return True
        except CorruptSlot as error:
            if not forget:
                continue
            log.warning("%s is damaged and will be made again: %s", what, error)
            slot.unseal()
            slot.use = Use.FREE
    return False


def unmap(slot: Slot) -> None:
    """Unmap the file of a slot, which is free then unless it is busy."""
    slot.unmap()
    if slot.use is not Use.BUSY:
        slot.use = Use.FREE


# The files of a node → the ranks that take them over


@dataclasses.dataclass
class AssignedFiles:
    """The files that a rank takes over: numbers, or None if there is none yet.

    The first of each kind is for the attempt that was chosen, the next one for the next save.
    """

    own: list[int | None]  # the rank's slots
    # by owner, copies of another rank's slots; under the rank's own number, its parity files
    inbox: dict[int, list[int | None]]
    share: list[int | None]  # files of shared state
    # the rank's state, and its share, on a disk
    kept: list[int | None] = dataclasses.field(default_factory=list)
    kept_share: list[int | None] = dataclasses.field(default_factory=list)


def assign(
    files: Inventory,
    names: Sequence[str],
    chosen: Attempt | None,
    same_ranks: bool,
    inboxes: Mapping[int, Sequence[int]],
    shares: Mapping[int, tuple[int, int]],
    own: int = 2,
    copies: int = 2,
    older: Collection[Attempt] = (),
    on_disk: bool = False,
    copied: Collection[int] = (),
    kept: int = 0,
) -> tuple[dict[int, AssignedFiles], list[int]]:
    """Divide the files of a node among its ranks, so that ranks that moved do not double the memory.

    A file of the chosen attempt goes to the rank that it concerns: the rank whose state it has, or that holds this
    copy, this parity or this share. The other files of that attempt come last, because they must not be written until
    the redundancy is complete in its new places.

    Args:
        files: the sealed files of this node.
        names: all slot files of this node, sealed or not.
        same_ranks: whether that attempt's ranks are the ranks of this run (same world size).
        inboxes: for each rank of this node, the ranks whose copies it holds, and itself if it holds parity.
        shares: for each rank of this node that stores a share of shared state, the numbers of set and share.
        own: number of slots for a rank's own state, and for its share.
        copies: number of slots for each copy, and for parity.
        on_disk: whether copies and parity are on a disk; all else is in memory.
        copied: files that were copied from a disk, for the ranks that they concern only.
        kept: number of slots on a disk for a rank's own state, and for its share.

    Returns:
        The files of each rank here, and the numbers of those left over (to be deleted once the redundancy is complete
        in its new places).
    """
    unused = _Unused(files, names, chosen, older, copied)
    assigned = {
        rank: AssignedFiles(
            [None] * own,
            {owner: [None] * copies for owner in inboxes[rank]},
            [None] * own,
            [None] * kept,
            [None] * kept,
        )
        for rank in inboxes
    }
    pairs: list[tuple[tuple[bool, Kind, object], list[int | None]]]
    pairs = [((False, Kind.SLOT, rank), assigned[rank].own) for rank in inboxes]
    pairs += [
        ((on_disk, Kind.PARITY if owner == rank else Kind.SLOT, owner), pair)
        for rank in inboxes
        for owner, pair in assigned[rank].inbox.items()
    ]
    pairs += [((False, Kind.SHARE, shares[rank]), assigned[rank].share) for rank in inboxes if rank in shares]
    if kept:
        pairs += [((True, Kind.SLOT, rank), assigned[rank].kept) for rank in inboxes]
        pairs += [((True, Kind.SHARE, shares[rank]), assigned[rank].kept_share) for rank in inboxes if rank in shares]
    if same_ranks:
        for (tier, kind, what), pair in pairs:
            pair[0] = unused.take(True, tier, kind, what)
    for index in range(max(copies, own)):
        at_index = [(content, pair) for content, pair in pairs if index < len(pair)]
        for (tier, kind, what), pair in at_index:
            if pair[index] is None:
                pair[index] = unused.take(False, tier, kind, what)
        for (tier, kind, _), pair in at_index:
            if pair[index] is None:  # keep the kind: slots and parity have different sizes
                pair[index] = unused.take(False, tier, kind, fills=True)
    for (tier, kind, _), pair in pairs:
        if pair[1] is None and pair[0] not in unused.chosen:  # so that one of the two can always be written
            pair[1] = unused.take(True, tier, kind)
    return assigned, sorted(unused.numbers)


class _Unused:
    """The files of a node that no rank has taken over yet, those that are held first; ``chosen``: by attempt."""

    def __init__(self, inventory: Inventory, names: Sequence[str], chosen: Attempt | None, older: Collection[Attempt],
                 copied: Collection[int]):  # fmt: skip
        self._held = {file for attempt in older for file in inventory.of(attempt).rows["file"].tolist()}
        self._copied = copied
        self.numbers = sorted(map(file_number, names), key=lambda number: (number not in self._held, number))
        self.chosen = {int(file) for file in inventory.of(chosen).rows["file"]} if chosen else set()
        self._content: dict[int, tuple[Kind, object]] = {}
        for row in inventory.rows:
            kind = Kind(row["kind"])
            of_share = (int(row["shared_by"]), int(row["number"]))
            self._content[int(row["file"])] = (kind, of_share if kind is Kind.SHARE else int(row["rank"]))

    def take(self, is_chosen: bool, tier: bool, kind: Kind, what: object = None, fills: bool = False) -> int | None:
        """Take the first file of a kind that holds ``what``; ``fills``: leave those that are held to their slots.

        ``tier``: whether it is on a disk.
        """
        for number in self.numbers:
            file_kind, holds = self._content.get(number, (kind, None))
            may_be = (number in self.chosen) is is_chosen and not (fills and number in self._held)
            may_be = may_be and not (what is None and number in self._copied)
            if may_be and is_on_disk(number) is tier and file_kind is kind and what in (None, holds):
                self.numbers.remove(number)
                return number
        return None
