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
from typing import Any, TypeVar, cast

import numpy as np
import xxhash

from ..crash_points import reach
from ..errors import DeadlineExceeded, MlflashError, SaveFailed, StateError
from ..memory.copy_threads import CopyThreads
from ..memory.memory_limits import available, headroom
from ..memory.own_slots import OwnSlots
from ..memory.shared_memory_segment import Segment
from ..memory.slot import Slot
from ..protect.deduplication import Piece, Plan, Sharing, own_pieces, pieces
from ..state import manifest
from ..state.layout import PAGE_NBYTES, Layout, plan
from ..state.leaves import (
    Flat,
    Leaf,
    Structure,
    as_bits,
    as_bytes,
    from_bytes,
    is_copied_as_bytes,
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
        for target in (slot,) if share is None else (slot, share):
            assert target.segment is not None
            if not target.segment.ready.wait(self._timeout_s):
                raise SaveFailed(f"the pages of {target.name} were not ready after {self._timeout_s:g} s")
            target.unseal()
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
            for leaf, work in _pieces_of(flat, planned, share, checks, lazy, samples):
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
        """Where each leaf that is not cut goes, and how."""
        layout = planned.layout
        key = (slot.name, "" if share is None else share.name)
        segments = [part.segment for part in (slot, share) if part is not None and part.segment is not None]
        copy_plan = self._copy_plans.get(key)
        # Compare mappings, not names: views belong to a mapping, and a new file may have the name of an old one.
        if copy_plan is None or copy_plan.layout is not layout or copy_plan.segments != segments:
            payload = slot.payload(layout.extents)
            _clear_gaps(layout, payload)
            targets: list[Any] = [
                from_bytes(entry, payload[entry.start : entry.start + entry.nbytes])
                if entry.nbytes and tie < 0 and not layout.is_shared(entry)
                else None
                for entry, tie in zip(layout.entries, flat.structure.ties, strict=True)
            ]
            if share is not None:
                for piece, room in own_pieces(planned, share):
                    if room.nbytes == layout.entries[piece.leaf].nbytes:
                        targets[piece.leaf] = from_bytes(layout.entries[piece.leaf], room)
            copy_plan = self._copy_plans[key] = CopyPlan(layout, segments, targets, self._copy_threads, self._timeout_s)
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


def _pieces_of(
    flat: Flat,
    planned: Plan,
    share: Slot,
    checks: dict[Piece, int],
    lazy: Collection[int],
    samples: SampledBytes | None,
) -> Iterator[tuple[int, Work]]:
    """For leaves that are cut: work that copies pieces of this rank's share, or puts those of others in ``checks``."""
    assert planned.sharing is not None

    def check(value: Any, piece: Piece) -> None:
        is_late = piece.leaf in lazy
        checks[piece] = xxhash.xxh3_64_intdigest(live_bytes(value, piece.start, piece.end, kept=is_late).data)

    def now(leaf: int) -> Any:
        value = flat.values[leaf]  # the leaf may move to other memory later
        return value if isinstance(value, np.ndarray) else value.detach()

    for piece, room in own_pieces(planned, share):
        entry = flat.structure.entries[piece.leaf]
        if room.nbytes < entry.nbytes:
            live = live_bytes(flat.values[piece.leaf], piece.start, piece.end, kept=piece.leaf in lazy)
            if samples is not None and piece.leaf in lazy:
                samples.add(entry.name, live, room)
            yield piece.leaf, functools.partial(np.copyto, room, live)
    for piece in planned.pieces:
        if piece.share != planned.sharing.share:
            yield piece.leaf, functools.partial(check, now(piece.leaf), piece)


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


# Where the leaves of a state go in one slot, and how: at once, or later. Large contiguous CPU tensors go through
# np.copyto (memcpy on one thread; torch's OpenMP copy is up to 26 times slower if ranks compete for cores). Small ones
# go through one torch._foreach_copy_ per dtype, and those on other devices through a `DeviceCopies`.


class CopyPlan:
    """Where the leaves go in one slot, and how; ``targets``: a view for each; None: nowhere, or in pieces."""

    def __init__(
        self, layout: Layout, segments: list[Segment], targets: list[Any], copy_threads: CopyThreads, timeout_s: float
    ):
        self.layout, self.segments, self._targets = layout, segments, targets
        self._copy_threads, self._timeout_s = copy_threads, timeout_s
        self._structure: Structure | None = None
        self._lazy: frozenset[int] = frozenset()

    def sort_leaves(self, flat: Flat, lazy: frozenset[int]) -> None:
        """Choose how each leaf of a state is copied; states of the very same structure are copied alike."""
        if flat.structure is self._structure and lazy == self._lazy:
            return
        self._at_once, self._later = _Kinds(), _Kinds()
        for number, (value, target) in enumerate(zip(flat.values, self._targets, strict=True)):
            if target is not None:
                (self._later if number in lazy else self._at_once).add(number, value, target)
        if self._at_once.on_devices or self._later.on_devices:
            for segment in self.segments:
                segment.pin()
        self._structure, self._lazy = flat.structure, lazy

    def copy(self, values: list[Any]) -> None:
        """Copy what is copied at once; then that may be changed again. Raises SaveFailed if a device takes too long."""
        kinds = self._at_once
        transfers = kinds.transfers(values, {}, self.segments)
        for number, target in kinds.arrays:
            np.copyto(target, values[number])
        works: list[Work] = []
        for number, target, raw in kinds.large:
            value = values[number]
            if value.is_conj() or value.is_neg():
                _copy_together([target], [value])
            elif self._copy_threads.threads == 1:
                np.copyto(raw, as_bytes(value))
            else:
                works += _in_pieces(raw, as_bytes(value))
        self._copy_threads.run(works)
        for dtype, (targets, numbers) in kinds.small.items():
            leaves = [values[n] for n in numbers]
            _copy_together(targets, list(map(as_bits, leaves)) if is_copied_as_bytes(dtype) else leaves)
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
        pieces: list[Work] = []
        for number, target in self._later.arrays:
            pieces.append(functools.partial(_compute, target, lazy[number]))
        for number, _, raw in self._later.large:
            live = kept_bytes(values[number].detach())
            samples.add(self.layout.entries[number].name, live, raw)
            pieces += _in_pieces(raw, live)
        noted = {}
        for device, (targets, numbers) in self._later.on_devices.items():
            names, leaves = [self.layout.entries[n].name for n in numbers], [values[n] for n in numbers]
            noted[device] = samples.note_on(device, names, leaves, [as_bytes(target) for target in targets])
        return pieces, self._later.transfers(values, noted, self.segments)

    def read_back(self, flat: Flat) -> None:
        """Read the smallest leaf of each kind as a restore would, and compare it with the live one.

        For a leaf that is copied later, only dtype and shape are compared: `SampledBytes` compares its bytes.
        """
        smallest: dict[tuple[Any, ...], int] = {}
        entries = self.layout.entries
        for number, (value, target) in enumerate(zip(flat.values, self._targets, strict=True)):
            if target is None and entries[number].nbytes:
                continue  # tied to another leaf, or copied in pieces
            kind = (entries[number].kind, entries[number].dtype, target is None, number in self._lazy, *_how(value))
            first = smallest.setdefault(kind, number)
            if entries[number].nbytes < entries[first].nbytes:
                smallest[kind] = number
        for number in smallest.values():
            value, target, entry = flat.values[number], self._targets[number], entries[number]
            read = from_bytes(entry, np.empty(0, dtype=np.uint8)) if target is None else target
            if (read.dtype, tuple(read.shape)) != (value.dtype, tuple(value.shape)):
                raise StateError("a restore would read another dtype or shape", tensor=entry.name,
                                 expected=f"{value.dtype} {tuple(value.shape)}",
                                 found=f"{read.dtype} {tuple(read.shape)}")  # fmt: skip
            is_there = target is not None and number not in self._lazy
            if is_there and not np.array_equal(as_bytes(target), live_bytes(value)):
                raise StateError("a restore would read other bytes than this leaf has: the copy is wrong, or the "
                                 "leaf was changed meanwhile", tensor=entry.name)  # fmt: skip


def _how(value: Any) -> tuple[Any, ...]:
    """What decides how a leaf is copied, besides its dtype."""
    if isinstance(value, np.ndarray):
        return (value.flags.c_contiguous,)
    is_odd = value.is_conj() or value.is_neg()
    return value.device, value.is_contiguous(), value.numel() * value.element_size() >= LARGE_NBYTES, is_odd


class _Kinds:
    """Leaves by how they are copied."""

    def __init__(self) -> None:
        self.arrays: list[tuple[int, Any]] = []  # numbers and targets of those that numpy copies
        # numbers of tensors, their targets, and the bytes of these, for memcpy
        self.large: list[tuple[int, Any, np.ndarray]] = []
        # for each dtype: targets and numbers of those that torch copies together
        self.small: dict[Any, tuple[list[Any], list[int]]] = {}
        self.on_devices: dict[Any, tuple[list[Any], list[int]]] = {}  # for each device: targets and numbers

    def add(self, number: int, value: Any, target: Any) -> None:
        if isinstance(value, np.ndarray):
            self.arrays.append((number, target))
        elif value.device.type == "cpu" and target.nbytes >= LARGE_NBYTES and value.is_contiguous():
            self.large.append((number, target, as_bytes(target)))
        else:
            on_host = value.device.type == "cpu"
            targets, numbers = (
                self.small.setdefault(value.dtype, ([], []))
                if on_host
                else self.on_devices.setdefault(value.device, ([], []))
            )
            targets.append(as_bits(target))
            numbers.append(number)

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


def _in_pieces(target: np.ndarray, source: np.ndarray) -> list[Work]:
    parts = (slice(at, at + _PIECE_NBYTES) for at in range(0, target.nbytes, _PIECE_NBYTES))
    return [functools.partial(np.copyto, target[part], source[part]) for part in parts]


def _compute(target: np.ndarray, leaf: Computed) -> None:
    np.copyto(target, leaf.value())


def _copy_together(targets: list[Any], values: list[Any]) -> None:
    torch = sys.modules["torch"]
    with torch.no_grad():
        torch._foreach_copy_(targets, values)


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
    room = np.empty(nbytes, dtype=np.uint8)
    values = [from_bytes(entry, room[entry.start : entry.start + entry.nbytes]) for entry in layout.entries]
    ties = flat.structure.ties
    targets = [value if tie < 0 else None for value, tie in zip(values, ties, strict=True)]
    copy_plan = CopyPlan(layout, [], targets, copy_threads, timeout_s=0.0)  # no leaf is on a device
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
        return True


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
