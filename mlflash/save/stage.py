"""Tensors → slot: the only part of a save that training waits for.

In the steady state nothing is planned, allocated or faulted in. The layout is cached by the structure of the state, and
for each slot it is cached where each leaf goes, and how. For state that this rank shares with others, it copies its own
share and makes checksums of the rest: with them the courier finds out whether all ranks hold the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
import xxhash

from ..crash_points import reach
from ..errors import DeadlineExceeded, MlflashError, SaveFailed
from ..memory.copy_threads import CopyThreads
from ..memory.own_slots import OwnSlots
from ..memory.slot import Slot
from ..protect.deduplication import Piece, Plan, Sharing, own_pieces, pieces
from ..state import manifest
from ..state.layout import PAGE_NBYTES, Layout, plan
from ..state.leaves import Flat, Leaf, Structure, from_bytes, live_bytes
from .copy_plan import CopyPlan
from .deferred_copies import DeferredCopies, SampledBytes, Work
from .until import LazySaves, Until

log = logging.getLogger("mlflash")

Method = TypeVar("Method", bound=Callable[..., Any])

NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""Of the leaves: none is copied later."""


def _whole_or_anew(method: Method) -> Method:
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
        self._ways: dict[tuple[str, str], CopyPlan] = {}
        self._read_back: tuple[Layout, bytes] | None = None  # read back as by a restore; later only values change
        self._copied: Layout | None = None

    def knows(self, flat: Flat) -> bool:
        """Whether a state is laid out already."""
        structure, known = flat.structure, self._structure
        if self._layout is None or known is None:
            return False
        return structure is known or (structure.entries, structure.ties) == (known.entries, known.ties)

    @_whole_or_anew
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
        self._ways.clear()
        return self._planned(flat, self._layout, sharing)

    def _planned(self, flat: Flat, layout: Layout, sharing: Sharing | None) -> Plan:
        shared = None
        if sharing is not None and layout.shared_nbytes:
            shared = manifest.Shared(sharing.by, len(sharing.siblings), layout.shared_nbytes)
        whole = manifest.join(self._entries, self._tree_bytes, flat.plain, shared, self._provenance)
        if self._read_back != (layout, self._tree_bytes):
            written = manifest.Manifest(layout.entries, flat.structure.tree, flat.plain, shared, self._provenance)
            manifest.read_back(whole, written, layout.extents.payload_nbytes)
        self._read_back = layout, self._tree_bytes  # the same objects: a comparison of others takes as long as a copy
        private = flat.structure.private
        return Plan(layout, whole, private) if shared is None else Plan(layout, whole, private, sharing, self._pieces)

    @_whole_or_anew
    def copy(
        self, flat: Flat, planned: Plan, slot: Slot, share: Slot | None = None, lazy: Mapping[int, Any] = NOTHING
    ) -> tuple[dict[Piece, int], DeferredCopies | None]:
        """Copy a state into a slot; when it returns, the live tensors may be changed again, except lazy ones.

        This unseals the slots, and they stay unsealed.

        Args:
            share: gets this rank's share of what it holds like others.
            lazy: numbers of the leaves that are copied later, each with the optimizer's tensor that contains it.

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
            lazy = {n: owner for n, owner in lazy.items() if owner.device.type == "cpu" or not shared(entries[n])}
        way = self._way(planned, slot, share, flat)
        way.lead(flat, frozenset(lazy))
        way.copy(flat.values)
        if self._copied is not planned.layout:
            way.read_back(flat)
            self._copied = planned.layout
        samples = SampledBytes() if lazy else None
        later, transfers = ([], []) if samples is None else way.begin(flat.values, samples)
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
        watched = ((names[n].name, tensor) for n, owner in lazy.items() for tensor in (flat.values[n], owner))
        copies = DeferredCopies(later, transfers, watched, self._timeout_s, samples)
        for segment in way.segments:
            segment.writers.append(copies)
        return checks, copies

    def _way(self, planned: Plan, slot: Slot, share: Slot | None, flat: Flat) -> CopyPlan:
        """Where each leaf that goes anywhere as a whole goes, and how."""
        layout = planned.layout
        key = (slot.name, "" if share is None else share.name)
        segments = [part.segment for part in (slot, share) if part is not None and part.segment is not None]
        way = self._ways.get(key)
        # Compare mappings, not names: views belong to a mapping, and a new file may have the name of an old one.
        if way is None or way.layout is not layout or way.segments != segments:
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
            way = self._ways[key] = CopyPlan(layout, segments, targets, self._copy_threads, self._timeout_s)
        return way

    def replan(self) -> None:
        """Lay the next state out anew: what is shared may have changed."""
        self._structure = None

    def forget(self) -> None:
        """Drop the cached views (the slots were replaced)."""
        self._ways.clear()


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


# Saves that all ranks begin before it is known whether they follow: a framework plans first, and may fail. A rank on
# which a save does not follow posts its failure: the jobs of all ranks must match.


@dataclasses.dataclass(eq=False)
class ReservedSave:
    """A save that was begun on all ranks, and that this rank posts, or fails."""

    step: int
    thread: threading.Thread  # works for it, and has finished with it when it posts it, begins something else, or ends
    staged_states: tuple[StagedState, ...]  # what had been staged early when it was begun; nothing else will use it
    is_claimed: bool = False  # whether its thread has come back to save it, and will post it


class ReservedSaves:
    """The reserved saves of this rank."""

    def __init__(self, post_failure: Callable[[ReservedSave], None], timeout_s: float):
        self._post_failure, self._timeout_s = post_failure, timeout_s
        self._all: list[ReservedSave] = []
        self._lock = threading.Lock()

    def add(self, step: int, thread: threading.Thread, staged_states: tuple[StagedState, ...]) -> ReservedSave:
        """Announce that a save follows; see `AdapterAPI.begin`."""
        reservation = ReservedSave(step, thread, staged_states)
        with self._lock:
            self._all.append(reservation)
        return reservation

    def end(self, at_once: bool = False) -> None:
        """Post the failure of saves that their thread has left; ``at_once``: also of those whose thread still works."""
        current = threading.current_thread()
        with self._lock:
            waiting = [save for save in self._all if not save.is_claimed]
            over = [save for save in waiting if at_once or save.thread is current or not save.thread.is_alive()]
            self._all = [save for save in self._all if save not in over]
        for reservation in over:
            if at_once:
                log.warning(
                    "step %d is not saved: the thread that began this save did not come back to it in time",
                    reservation.step,
                )
            self._post_failure(reservation)

    def wait(self) -> None:
        """Wait until all saves, or their failures, are posted; what this thread posts next comes after them."""
        end = time.monotonic() + self._timeout_s
        self.end()
        while self._all:
            time.sleep(1e-3)
            self.end(at_once=time.monotonic() > end)

    @contextlib.contextmanager
    def claimed(self, reservation: ReservedSave) -> Iterator[None]:
        """Let other threads' posts wait until the block has posted this save. Raises SaveFailed if it was given up."""
        with self._lock:
            if reservation not in self._all:
                raise SaveFailed("this save was given up before its thread came back to it", step=reservation.step)
            reservation.is_claimed = True
        try:
            yield
        finally:
            with self._lock:
                self._all.remove(reservation)
