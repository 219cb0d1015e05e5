"""Tensors → slot: the only part of a save that training waits for.

In the steady state nothing is planned, allocated or faulted in. The layout is cached by the structure of the state, and
for each slot it is cached where each leaf goes, and how. For state that this rank shares with others, it copies its own
share and makes checksums of the rest: with them the courier finds out whether all ranks hold the same.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import xxhash

from ..crash_points import reach
from ..errors import DeadlineExceeded, MlflashError, SaveFailed, StateError
from ..memory.copy_threads import CopyThreads
from ..memory.memory_limits import available, headroom
from ..memory.own_slots import OwnSlots
from ..memory.shared_memory_segment import Segment
from ..memory.slot import Slot
from ..protect.deduplication import Piece, Plan, Sharing, pieces
from ..state import copy_kernel, manifest
from ..state.copy_kernel import Todo, addresses
from ..state.layout import PAGE_NBYTES, Extents, Layout, plan
from ..state.leaves import (
    Entry,
    Flat,
    Leaf,
    Structure,
    as_bits,
    as_bytes,
    from_bytes,
    has_memory,
    is_as_stored,
    kept_bytes,
    live_bytes,
)
from .deferred_copies import LARGE_NBYTES, Computed, DeferredCopies, DeviceCopies, SampledBytes, Work
from .lazy_saves import LazySaves, Until

Method = TypeVar("Method", bound=Callable[..., Any])

NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""Of the leaves: none is copied later."""
_PIECE_NBYTES = 8 << 20  # the longest wait of training if the courier is in the middle of a piece


def _all_or_anew(method: Method) -> Method:
    """If an exception interrupts the method, make the next call trust nothing that is cached.

    An exception may come at any moment, because some signal handlers raise: between two things that belong together.
    """

    @functools.wraps(method)
    def call(self: Staging, *args: Any, **options: Any) -> Any:
        if self._in_the_middle:
            self._start_over()
        self._in_the_middle = True
        result = method(self, *args, **options)
        self._in_the_middle = False
        return result

    return cast("Method", call)


class Staging:
    """Copies states of (mostly) one structure into slots."""

    def __init__(self, copy_threads: CopyThreads, timeout_s: float, provenance: Mapping[str, Any] = NOTHING):
        self._copy_threads, self._timeout_s = copy_threads, timeout_s
        self._provenance = provenance
        self._start_over()

    def _start_over(self) -> None:
        self._in_the_middle = False
        self._structure: Structure | None = None
        self._tree: Any = None
        self._layout: Layout | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._entries = self._tree_bytes = b""
        self._copy_plans: dict[tuple[str, str], CopyPlan] = {}
        self._read_back: tuple[Layout, bytes] | None = None  # read back as by a restore; later only values change
        self._copied: Layout | None = None

    def knows(self, flat: Flat) -> bool:
        """Whether a state is laid out already."""
        structure, known = flat.structure, self._structure
        if self._layout is None or known is None:
            return False
        return structure is known or (structure.entries, structure.ties) == (known.entries, known.ties)

    @_all_or_anew
    def plan(self, flat: Flat, sharing: Sharing | None = None, is_shared: Callable[[Leaf], bool] | None = None) -> Plan:
        """Lay out a state, or find it laid out; ``is_shared``: which parts ranks hold alike, if it is new."""
        structure, known = flat.structure, self.knows(flat)
        if not known or structure.tree is not self._tree:
            self._tree_bytes = manifest.encode_tree(structure.tree)  # not compared, because 1 == True == 1.0
            self._tree = structure.tree
        if known and self._layout is not None:
            self._structure = structure
            planned = self._planned(flat, self._layout, sharing)
            if len(planned.manifest) <= self._layout.extents.manifest_room:
                return planned
            shared = {i for i, e in enumerate(self._layout.entries) if self._layout.is_shared(e)}
        else:
            shared = set()
            for i, leaf in enumerate(flat.leaves):
                if leaf.tie in shared or (leaf.tie < 0 and is_shared is not None and is_shared(leaf)):
                    shared.add(i)
        # The length of the entries' text depends on their places. Twice the text without places is enough room.
        draft = manifest.encode_entries(structure.entries)
        joined = manifest.join(draft, self._tree_bytes, flat.plain, None, self._provenance)
        length = len(joined) + 20 * len(structure.entries) + 80
        self._layout = plan(flat, length, shared)
        self._pieces = () if sharing is None else tuple(pieces(self._layout, len(sharing.siblings)))
        self._structure = structure
        self._entries = manifest.encode_entries(self._layout.entries)
        self._copy_plans.clear()
        return self._planned(flat, self._layout, sharing)

    def _planned(self, flat: Flat, layout: Layout, sharing: Sharing | None) -> Plan:
        shared = None
        if sharing is not None and layout.shared_nbytes:
            shared = manifest.Shared(sharing.by, len(sharing.siblings), layout.shared_nbytes)
        packed = manifest.join(self._entries, self._tree_bytes, flat.plain, shared, self._provenance)
        if self._read_back != (layout, self._tree_bytes):
            written = manifest.Manifest(layout.entries, flat.structure.tree, flat.plain, shared, self._provenance)
            manifest.read_back(packed, written, layout.extents.payload_nbytes)
        self._read_back = layout, self._tree_bytes  # the same objects: a comparison of others takes as long as a copy
        private = flat.structure.private
        return Plan(layout, packed, private) if shared is None else Plan(layout, packed, private, sharing, self._pieces)

    @_all_or_anew
    def copy(
        self, flat: Flat, planned: Plan, slot: Slot, share: Slot | None = None, lazy: Mapping[int, Any] = NOTHING
    ) -> tuple[dict[Piece, int], DeferredCopies | None]:
        """Copy a state into a slot; when it returns, the live tensors may be changed again, except lazy ones.

        This unseals the slots, and they stay unsealed.

        Args:
            share: gets this rank's share of what it holds like others.
            lazy: numbers of the leaves that are copied later, each with the optimizer's tensor that contains it, or how
                it is computed then.

        Returns:
            The checksums of the pieces of other shares, once everything is copied; and what is copied later, or None.

        Raises:
            SaveFailed: the pages of a slot are not ready in time.
            StateError: the copy is not what a restore would read.
        """
        if planned.sharing is None:
            share = None
        for target, extents in _files_of(planned, slot, share):
            assert target.segment is not None
            if not target.segment.ready.wait(self._timeout_s):
                raise SaveFailed(f"the pages of {target.name} were not ready after {self._timeout_s:g} s")
            target.begin(extents)  # the courier makes the checksums that are not made here
        reach("stage.unsealed")
        slot.view[PAGE_NBYTES : PAGE_NBYTES + len(planned.manifest)] = np.frombuffer(planned.manifest, dtype=np.uint8)
        if share is not None:  # the host copies and checks leaves that are cut
            shared, entries = planned.layout.is_shared, planned.layout.entries
            lazy = {n: owner for n, owner in lazy.items() if not shared(entries[n]) or owner.device.type == "cpu"}
        copy_plan = self._copy_plan(planned, slot, share, flat)
        copy_plan.sort_leaves(flat, frozenset(lazy))
        copy_plan.copy(flat.values)
        if self._copied is not planned.layout:
            copy_plan.read_back(flat)
            self._copied = planned.layout
        samples = SampledBytes() if lazy else None
        later, transfers = ([], []) if samples is None else copy_plan.begin(flat.values, lazy, samples)
        checks: dict[Piece, int] = {}
        if share is not None:
            for leaf, work in _checks_of_others(flat, planned, checks, lazy):
                if leaf in lazy:
                    later.append(work)
                else:
                    work()
        reach("stage.copied")
        if samples is None or not (later or transfers):
            return checks, None
        samples.note()
        names = flat.structure.entries
        watched = [
            (names[n].name, tensor)
            for n, owner in lazy.items()
            for tensor in (owner.watched if isinstance(owner, Computed) else (flat.values[n], owner))
        ]
        copies = DeferredCopies(later, transfers, watched, self._timeout_s, samples)
        for segment in copy_plan.segments:
            segment.writers.append(copies)
        return checks, copies

    def _copy_plan(self, planned: Plan, slot: Slot, share: Slot | None, flat: Flat) -> CopyPlan:
        """Where each leaf goes, and how."""
        layout, sharing = planned.layout, planned.sharing
        key = (slot.name, "" if share is None else share.name)
        files = _files_of(planned, slot, share)
        segments = [part.segment for part, _ in files if part.segment is not None]
        copy_plan = self._copy_plans.get(key)
        # Compare mappings, not names: views belong to a mapping, and a new file may have the name of an old one.
        if copy_plan is None or copy_plan.layout is not layout or copy_plan.segments != segments:
            _clear_gaps(layout, slot.payload(layout.extents))
            rooms = [Room(part.body(size), size.block_nbytes, part.table(size)) for part, size in files]
            places = _places(layout, flat.structure.ties, layout.extents.manifest_room)
            places += [
                Place(piece.leaf, 1, piece.at, piece.start, piece.end)
                for piece in planned.pieces
                if sharing is not None and piece.share == sharing.share
            ]
            copy_plan = CopyPlan(layout, segments, rooms, places, self._copy_threads, self._timeout_s)
            self._copy_plans[key] = copy_plan
        return copy_plan

    def replan(self) -> None:
        """Lay the next state out anew: what is shared may have changed."""
        self._structure = None

    def forget(self) -> None:
        """Drop the cached views (the slots were replaced)."""
        self._copy_plans.clear()


def has_room(planned: Plan, slot: Slot, share: Slot) -> bool:
    """Whether a state fits into slots of their present size."""
    size = planned.share_extents
    return slot.view.nbytes >= planned.layout.extents.nbytes and (size is None or share.view.nbytes >= size.nbytes)


def _files_of(planned: Plan, slot: Slot, share: Slot | None) -> list[tuple[Slot, Extents]]:
    """The files that a state goes into, and how they are laid out."""
    size = planned.share_extents
    own = [(slot, planned.layout.extents)]
    return own if share is None or size is None else [*own, (share, size)]


def _checks_of_others(
    flat: Flat, planned: Plan, checks: dict[Piece, int], lazy: Collection[int]
) -> Iterator[tuple[int, Work]]:
    """For each piece of another rank's share, its leaf, and work that puts its checksum into ``checks``."""
    assert planned.sharing is not None

    def check(value: Any, piece: Piece) -> None:
        is_late = piece.leaf in lazy
        checks[piece] = xxhash.xxh3_64_intdigest(live_bytes(value, piece.start, piece.end, kept=is_late).data)

    for piece in planned.pieces:
        if piece.share != planned.sharing.share:
            value = flat.values[piece.leaf]  # the leaf may move to other memory later
            now = value if isinstance(value, np.ndarray) else value.detach()
            yield piece.leaf, functools.partial(check, now, piece)


def _clear_gaps(layout: Layout, payload: np.ndarray) -> None:
    """Zero the bytes between the extents, so that equal states give equal blocks."""
    at = 0
    for entry in layout.entries:
        if layout.is_shared(entry):
            continue
        if entry.start > at:
            payload[at : entry.start] = 0
        at = max(at, entry.start + entry.nbytes)
    payload[at:] = 0


# Where the leaves of a state go in one slot and its share, and how: at once, or later. Contiguous ones in the host's
# memory go through `copy_kernel`, which makes the checksums of blocks along with the copy. Before that torch and NumPy
# copy the others, and those on other devices go through a `DeviceCopies`. A block that is not complete then keeps a 0
# in the table, and the courier makes its checksum.


class Room(NamedTuple):
    """A file, or plain memory, that leaves go into; ``table``: of its blocks, or None if nobody needs one."""

    body: np.ndarray  # (nbytes,) uint8
    block_nbytes: int
    table: np.ndarray | None  # (blocks,) uint64


class Place(NamedTuple):
    """Where the bytes ``start`` to ``end`` of a leaf go: to ``at`` in the body of a room, which has a number."""

    leaf: int
    room: int
    at: int
    start: int
    end: int


def _places(layout: Layout, ties: Sequence[int], base: int) -> list[Place]:
    """The places of all leaves but shared ones, in their room; ``base``: where the payload begins there."""
    return [
        Place(number, 0, base + entry.start, 0, entry.nbytes)
        for number, (entry, tie) in enumerate(zip(layout.entries, ties, strict=True))
        if entry.nbytes and tie < 0 and not layout.is_shared(entry)
    ]


class CopyPlan:
    """Where the leaves go, and how; a leaf without a place is empty, tied to another one, or stored by other ranks."""

    def __init__(
        self, layout: Layout, segments: list[Segment], rooms: Sequence[Room], places: Sequence[Place],
        copy_threads: CopyThreads, timeout_s: float,
    ):  # fmt: skip
        self.layout, self.segments = layout, segments
        self._rooms, self._places = rooms, sorted(places, key=lambda place: (place.room, place.at))
        self._copy_threads, self._timeout_s = copy_threads, timeout_s
        self._structure: Structure | None = None
        self._lazy: frozenset[int] = frozenset()

    def sort_leaves(self, flat: Flat, lazy: frozenset[int]) -> None:
        """Choose how each leaf of a state is copied; states of the very same structure are copied alike."""
        if flat.structure is self._structure and lazy == self._lazy:
            return
        self._at_once, self._later = _Kinds(), _Kinds()
        for place in self._places:
            value, raw, entry = flat.values[place.leaf], self._bytes_at(place), self.layout.entries[place.leaf]
            if place.leaf not in lazy:
                self._at_once.add(place, value, raw, entry)
            elif isinstance(value, np.ndarray):  # it is `Computed`
                self._later.typed.append((place, from_bytes(entry, raw)))
            else:
                self._later.add(place, value, raw, entry)
        if self._at_once.on_devices or self._later.on_devices:
            for segment in self.segments:
                segment.pin()
        others = [*self._at_once.of_devices, *self._later.of_devices, *(place for place, _ in self._later.typed)]
        self._copies = [
            _copies_into(room, *(
                [place for place in places if place.room == number]
                for places in (self._at_once.contiguous, self._later.contiguous, others)
            ))
            for number, room in enumerate(self._rooms)
        ]  # fmt: skip
        self._structure, self._lazy = flat.structure, lazy

    def _bytes_at(self, place: Place) -> np.ndarray:
        return self._rooms[place.room].body[place.at : place.at + place.end - place.start]

    def copy(self, values: list[Any]) -> None:
        """Copy what is copied at once; then that may be changed again. Raises SaveFailed if a device takes too long."""
        kinds = self._at_once
        transfers = kinds.transfers(values, {}, self.segments)
        for place in kinds.cut:
            np.copyto(self._bytes_at(place), live_bytes(values[place.leaf], place.start, place.end))
        for place, target in kinds.typed:
            if isinstance(target, np.ndarray):
                np.copyto(target, values[place.leaf])
            else:
                with sys.modules["torch"].no_grad():
                    as_bits(target).copy_(as_bits(values[place.leaf]))
        is_alone = self._copy_threads.threads == 1
        self._copy_threads.run([work for now, _ in self._copies for work in now.works(values, is_alone)])
        for transfer in transfers:
            if not transfer.wait(self._timeout_s):
                raise SaveFailed(f"a device did not finish its copies within {self._timeout_s:g} s")

    def begin(
        self, values: list[Any], lazy: Mapping[int, Any], samples: SampledBytes
    ) -> tuple[list[Work], list[DeviceCopies]]:
        """Begin what is copied later; return the pieces still to be copied, and the copies that devices are making.

        Both use the places where the bytes are now, because a parameter may get other memory meanwhile (FSDP does
        that).
        """
        kinds = self._later
        pieces: list[Work] = [functools.partial(_compute, target, lazy[place.leaf]) for place, target in kinds.typed]
        lives = {place.leaf: kept_bytes(values[place.leaf].detach()) for place in kinds.contiguous}
        for place in kinds.contiguous:
            live = lives[place.leaf][place.start : place.end]
            samples.add(self.layout.entries[place.leaf].name, live, self._bytes_at(place))
        for _, then in self._copies:
            pieces += then.works(lives)
        noted = {}
        for device, (targets, numbers) in kinds.on_devices.items():
            names, leaves = [self.layout.entries[n].name for n in numbers], [values[n] for n in numbers]
            noted[device] = samples.note_on(device, names, leaves, [as_bytes(target) for target in targets])
        return pieces, kinds.transfers(values, noted, self.segments)

    def read_back(self, flat: Flat) -> None:
        """Read the smallest leaf of each kind as a restore would, and compare it with the live one.

        For a leaf that is copied later, only dtype and shape are compared: `SampledBytes` compares its bytes.
        """
        smallest: dict[tuple[Any, ...], int] = {}
        entries, place_of = self.layout.entries, {place.leaf: place for place in self._places}
        for number, value in enumerate(flat.values):
            place, nbytes = place_of.get(number), entries[number].nbytes
            if nbytes and (place is None or place.end - place.start < nbytes):
                continue  # tied to another leaf, or cut
            kind = (entries[number].kind, entries[number].dtype, nbytes == 0, number in self._lazy, *_how(value))
            first = smallest.setdefault(kind, number)
            if nbytes < entries[first].nbytes:
                smallest[kind] = number
        for number in smallest.values():
            value, entry = flat.values[number], entries[number]
            raw = self._bytes_at(place_of[number]) if number in place_of else np.empty(0, dtype=np.uint8)
            read = from_bytes(entry, raw)
            if (read.dtype, tuple(read.shape)) != (value.dtype, tuple(value.shape)):
                raise StateError("a restore would read another dtype or shape", tensor=entry.name,
                                 expected=f"{value.dtype} {tuple(value.shape)}",
                                 found=f"{read.dtype} {tuple(read.shape)}")  # fmt: skip
            if number not in self._lazy and not np.array_equal(raw, live_bytes(value)):
                raise StateError("a restore would read other bytes than this leaf has: the copy is wrong, or the "
                                 "leaf was changed meanwhile", tensor=entry.name)  # fmt: skip


def _how(value: Any) -> tuple[Any, ...]:
    """What decides how a leaf is copied, besides its dtype."""
    if isinstance(value, np.ndarray):
        return (value.flags.c_contiguous,)
    return value.device, value.is_contiguous(), value.is_conj() or value.is_neg()


class _Kinds:
    """Leaves by how they are copied."""

    def __init__(self) -> None:
        self.contiguous: list[Place] = []  # in the host's memory, and all bits as they are
        # typed: each with a view of the leaf's dtype and shape. cut: parts of leaves that are not contiguous
        self.typed: list[tuple[Place, Any]] = []
        self.cut: list[Place] = []
        self.on_devices: dict[Any, tuple[list[Any], list[int]]] = {}  # for each device: targets and numbers
        self.of_devices: list[Place] = []  # the same leaves

    def add(self, place: Place, value: Any, raw: np.ndarray, entry: Entry) -> None:
        """Add a leaf, or a part of one, and the bytes where it goes."""
        is_array = isinstance(value, np.ndarray)
        on_host = is_array or value.device.type == "cpu"
        if is_as_stored(value):
            self.contiguous.append(place)
        elif raw.nbytes < entry.nbytes:
            self.cut.append(place)
        elif on_host:
            self.typed.append((place, from_bytes(entry, raw)))
        else:
            targets, numbers = self.on_devices.setdefault(value.device, ([], []))
            targets.append(as_bits(from_bytes(entry, raw)))
            numbers.append(place.leaf)
            self.of_devices.append(place)

    def transfers(
        self, values: list[Any], more: Mapping[Any, tuple[Any, Any]], segments: Sequence[Segment]
    ) -> list[DeviceCopies]:
        """Let devices begin their copies; ``more``: a further target and value, by device."""
        copies = []
        for device, (targets, numbers) in self.on_devices.items():
            leaves = [as_bits(values[n]) for n in numbers]
            if device in more:
                target, value = more[device]
                targets, leaves = [*targets, target], [*leaves, value]
            copies.append(DeviceCopies(device, targets, leaves, segments))
        return copies


def _copies_into(
    room: Room, now: Sequence[Place], then: Sequence[Place], others: Sequence[Place]
) -> tuple[_PartCopies, _PartCopies]:
    """The copies of contiguous leaves into a room, now and later; ``others``: what something else fills later."""
    blocks = -(-room.body.nbytes // room.block_nbytes)
    touched = []
    for places in (now, then, others):
        touched.append(np.zeros(blocks, dtype=bool))
        for place in places:
            end = place.at + place.end - place.start
            touched[-1][place.at // room.block_nbytes : -(-end // room.block_nbytes)] = True
    is_now, is_then, is_other = touched
    unchecked = is_other | (room.table is None)
    todo_now = np.where(is_then | unchecked, np.where(is_now, Todo.COPY, Todo.SKIP), Todo.COPY_AND_CHECK)
    todo_then = np.where(is_then, np.where(unchecked, Todo.COPY, Todo.COPY_AND_CHECK), Todo.SKIP)
    return _PartCopies(room, now, todo_now), _PartCopies(room, then, todo_then)


class _PartCopies:
    """Copies of contiguous leaves, or parts of them, into a room; ``todo``: of each of its blocks."""

    def __init__(self, room: Room, places: Sequence[Place], todo: np.ndarray):
        self._room, self._todo = room, todo.astype(np.uint8)
        self._leaves = [place.leaf for place in places]
        self._large = [place.leaf for place in places if place.end - place.start >= LARGE_NBYTES]
        self._sources: list[int] = []  # where the leaves were the last time
        self._parts = np.zeros(len(places), dtype=copy_kernel.PART)
        self._parts["start"] = [place.at for place in places]
        self._parts["nbytes"] = [place.end - place.start for place in places]
        self._offsets = np.array([place.start for place in places], dtype="<u8")
        many = max(1, _PIECE_NBYTES // room.block_nbytes)
        runs = [(first, min(first + many, len(todo))) for first in range(0, len(todo), many)]
        self._runs = [(first, last) for first, last in runs if self._todo[first:last].any()]

    def works(self, values: Mapping[int, Any] | list[Any], as_one: bool = False) -> list[Work]:
        """Return pieces of work that make all of them from where the leaves are now; ``as_one``: at most one."""
        if not self._runs:
            return []
        leaves, parts = [values[leaf] for leaf in self._leaves], self._parts.copy()
        parts["source"] = sources = addresses(leaves)
        parts["source"] += self._offsets
        for leaf in self._large if sources == self._sources else self._leaves:
            if not isinstance(values[leaf], np.ndarray) and not has_memory(values[leaf]):
                raise AssertionError(f"the storage of this tensor was freed: {tuple(values[leaf].shape)}")
        if sources != self._sources:
            self._sources = sources
        runs = [(self._runs[0][0], self._runs[-1][1])] if as_one else self._runs
        return [functools.partial(self._fill, parts, leaves, first, last) for first, last in runs]

    def _fill(self, parts: np.ndarray, leaves: list[Any], first: int, last: int) -> None:
        """Copy a run of blocks; ``leaves`` stay in memory meanwhile."""
        room = self._room
        copy_kernel.fill(room.body, room.block_nbytes, parts, self._todo, first, last, room.table)


def _compute(target: np.ndarray, leaf: Computed) -> None:
    np.copyto(target, leaf.value())


# Without slots of the right size: a copy in plain memory of this process, so that training need not wait. The pages
# of a slot are made for all ranks of a node, are filled with zeros, and are mapped by two processes; plain memory
# needs none of that.


def copy_to_host(flat: Flat, slots: float, memory: str, local_size: int, copy_threads: CopyThreads) -> Flat | None:
    """Copy a state.

    Args:
        slots: bytes that all slots of a rank, and their redundancy, take for each byte of it.

    Returns:
        The same leaves with values of their own. None if some are on a device, which copies at full speed only to
        page-locked memory, or if the node would not have the memory in addition to that of all slots.
    """
    if flat.is_on_device:
        return None
    layout = plan(flat, 0)
    nbytes = layout.extents.payload_nbytes
    wanted = int(local_size * nbytes * (1 + slots))
    if wanted + headroom(wanted) > min(available(memory).values()):
        return None
    body = copy_kernel.aligned(nbytes)
    values = [from_bytes(entry, body[entry.start : entry.start + entry.nbytes]) for entry in layout.entries]
    room, places = Room(body, layout.extents.block_nbytes, None), _places(layout, flat.structure.ties, 0)
    copy_plan = CopyPlan(layout, [], [room], places, copy_threads, timeout_s=0.0)  # no leaf is on a device
    copy_plan.sort_leaves(flat, frozenset())
    copy_plan.copy(flat.values)
    return Flat(flat.structure, values, flat.plain, flat.wholes)


# States that are staged before their step is known


@dataclasses.dataclass(eq=False)
class StagedState:
    """A state that was staged before its step is known."""

    slot: Slot
    share: Slot
    plan: Plan
    inode: int
    checks: dict[Piece, int]
    later: DeferredCopies | None
    given_up: bool = False  # whether the slot was given to other saves
    maker: int = dataclasses.field(default_factory=os.getpid)

    @property
    def is_lazy(self) -> bool:
        """Whether some of it was not there yet when it was staged: before you read its bytes, call `finish`."""
        return self.later is not None

    def finish(self) -> None:
        """Wait until all of it is there. Raises StateError if the state was changed meanwhile or not copied."""
        if self.later is not None:
            self.later.finish()
            if self.later.error is not None:
                raise self.later.error

    def bytes_of(self, leaf: int) -> np.ndarray | None:
        """The bytes of a leaf; None if they are shared with other ranks, which may store them."""
        layout = self.plan.layout
        entry = layout.entries[leaf]
        if layout.is_shared(entry):
            return None
        return self.slot.payload(layout.extents)[entry.start : entry.start + entry.nbytes]

    def write(self, leaf: int, content: bytes) -> bool:
        """Write bytes into a leaf that was staged as blanks; False if it is too small, or if the slot was given up."""
        room = self.bytes_of(leaf)
        if room is None or self.given_up or len(content) > room.nbytes:
            return False
        room[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        self.uncheck(leaf)
        return True

    def uncheck(self, leaf: int | None = None) -> None:
        """Leave the checksums of a leaf's blocks, or of all, to the courier, also those that are still being made."""
        extents = self.plan.layout.extents
        first, last = 0, extents.body_nbytes
        if leaf is not None:
            first = extents.manifest_room + self.plan.layout.entries[leaf].start
            last = first + self.plan.layout.entries[leaf].nbytes
        checks = self.slot.table(extents)[first // extents.block_nbytes : -(-last // extents.block_nbytes)]
        checks[:] = 0
        if self.later is not None:
            self.later.when_made.append(lambda: checks.fill(0))


class StagedStates:
    """The staged states of this rank."""

    def __init__(self, stage: Staging, pool: OwnSlots, lazy: LazySaves):
        self._stage, self._pool, self._lazy = stage, pool, lazy
        self.all: tuple[StagedState, ...] = ()

    def stage(self, flat: Flat, planned: Plan, timeout_s: float, until: Until | None = None) -> StagedState | None:
        """Stage a state; None if no slots are free in time, or if they have to be made first."""
        early: StagedState | None = None
        try:
            taken = self._pool.take(timeout_s, flat)
            if taken is None or not has_room(planned, *taken):
                return None
            assert taken[0].segment is not None
            inode = taken[0].segment.inode
            copied = self._stage.copy(flat, planned, *taken, self._lazy.find(flat, until))
            early = StagedState(*taken, planned, inode, *copied)
            self._pool.hand_over(taken, early)
            self.all += (early,)
            if early.later is not None:
                self._lazy.begin(early.later)
                threading.Thread(target=early.later.help, name="mlflash-copies", daemon=True).start()
        except MlflashError:
            return None
        finally:
            if early is None:
                self._pool.give_back(flat)
        return early

    def take(self, early: StagedState) -> bool:
        """Leave a state to a save; False if it was given up."""
        known = early in self.all
        self.all = tuple(other for other in self.all if other is not early)
        return known

    def give_up(self, early: StagedState) -> None:
        """Let other saves use the slots of a state."""
        if self.take(early):
            early.given_up = True
            # A forked process has nobody that makes these copies.
            if early.later is not None and early.maker == os.getpid():
                try:
                    early.later.cancel()
                except DeadlineExceeded:
                    pass  # a device still writes: nobody gets that slot
            self._pool.give_back(early)
