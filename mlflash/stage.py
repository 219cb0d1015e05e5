"""Tensors → slot: the only part of a save that training waits for.

In the steady state nothing is planned, allocated or faulted in: the layout is cached by a fingerprint of the
structure, the destination views by slot. Large contiguous CPU tensors go through ``np.copyto`` (memcpy on one
thread; torch's OpenMP copy is up to 26 times slower where ranks fight for cores), small ones and those on
other devices through one ``torch._foreach_copy_`` per dtype and device.

Of state that this rank shares with others it copies its own share, and makes checksums of the rest: with them the
courier finds out whether all that hold it hold the same.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from . import manifest
from .errors import SaveFailed
from .layout import PAGE_NBYTES, Extents, Layout, plan
from .points import reach
from .segment import Segment
from .sharing import Piece, Sharing, cuts, pieces
from .slot import Slot
from .state import Flat, Leaf, as_bytes, from_bytes, live_bytes

_SMALL_NBYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a state goes, and the manifest that says so.

    Attributes:
        layout: of the rank's slot.
        manifest: of the rank's slot.
        private: names of tensors that each rank has its own of.
        sharing: the ranks that hold some of it alike; None: nothing is shared.
        pieces: of what is shared.
    """

    layout: Layout
    manifest: bytes
    private: frozenset[str]
    sharing: Sharing | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        share = self.share_extents
        return self.layout.extents.nbytes + (0 if share is None else share.nbytes)

    @property
    def share_extents(self) -> Extents | None:
        """Of the file of this rank's share; None: nothing is shared."""
        if self.sharing is None:
            return None
        low, high = cuts(self.layout.shared_nbytes, len(self.sharing.siblings))[self.sharing.share :][:2]
        return Extents(0, high - low, self.layout.extents.block_nbytes)


@dataclasses.dataclass(eq=False)
class Ahead:
    """A state that was staged before its step is known.

    Attributes:
        slot, share: where it is.
        plan: how.
        segment, checks: as in `commit.Save`.
        given_up: whether the slot was given to other saves.
    """

    slot: Slot
    share: Slot
    plan: Plan
    segment: Segment | None
    checks: dict[Piece, int]
    given_up: bool = False

    def bytes_of(self, leaf: int) -> np.ndarray | None:
        """The bytes of a leaf; None where they are shared with other ranks, and may be stored there."""
        layout = self.plan.layout
        entry = layout.entries[leaf]
        if layout.is_shared(entry):
            return None
        return self.slot.payload(layout.extents)[entry.start : entry.start + entry.nbytes]

    def write(self, leaf: int, content: bytes) -> bool:
        """Put bytes into a leaf that was staged as blanks; False where it is too small, or the slot was given up."""
        room = self.bytes_of(leaf)
        if room is None or self.given_up or len(content) > room.nbytes:
            return False
        room[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        return True


class Stage:
    """Copies states of (mostly) one structure into slots.

    Args:
        block_nbytes: bytes per checksum, for the layout.
        timeout_s: how long the pages of a new slot may take to be there, seconds.
    """

    def __init__(self, block_nbytes: int, timeout_s: float):
        self._block_nbytes, self._timeout_s = block_nbytes, timeout_s
        self._fingerprint: tuple[object, ...] | None = None
        self._tree: Any = None
        self._layout: Layout | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._entries = self._tree_bytes = b""
        self._views: dict[tuple[str, str], tuple[Layout, list[Segment], list[Any]]] = {}

    def knows(self, flat: Flat) -> bool:
        """Whether a state is laid out already. Not collective."""
        return self._layout is not None and flat.fingerprint == self._fingerprint

    def plan(self, flat: Flat, sharing: Sharing | None = None, is_shared: Callable[[Leaf], bool] | None = None) -> Plan:
        """Lay a state out, or find that it is laid out like the one before. Not collective.

        Args:
            flat: the state.
            sharing: the ranks that hold some of it alike.
            is_shared: which of it these hold alike; asked only for a state that is not known.
        """
        known = self.knows(flat)
        if not known or flat.tree != self._tree:
            self._tree, self._tree_bytes = flat.tree, manifest.encode_tree(flat.tree)
        if known and self._layout is not None:
            planned = self._planned(flat, self._layout, sharing)
            if len(planned.manifest) <= self._layout.extents.manifest_room:
                return planned
            shared = {i for i, e in enumerate(self._layout.entries) if self._layout.is_shared(e)}
        else:
            shared = set()
            for i, leaf in enumerate(flat.leaves):
                if leaf.tie in shared or (leaf.tie < 0 and is_shared is not None and is_shared(leaf)):
                    shared.add(i)
        # The entries' text depends on their places; twice the text of unplaced ones is room enough.
        draft = manifest.encode_entries(tuple(leaf.entry for leaf in flat.leaves))
        length = len(manifest.join(draft, self._tree_bytes, flat.plain)) + 20 * len(flat.leaves) + 80
        self._layout = plan(flat, length, self._block_nbytes, shared)
        self._pieces = () if sharing is None else tuple(pieces(self._layout, len(sharing.siblings)))
        self._fingerprint = flat.fingerprint
        self._entries = manifest.encode_entries(self._layout.entries)
        self._views.clear()
        return self._planned(flat, self._layout, sharing)

    def _planned(self, flat: Flat, layout: Layout, sharing: Sharing | None) -> Plan:
        if sharing is None or not layout.shared_nbytes:
            return Plan(layout, manifest.join(self._entries, self._tree_bytes, flat.plain), flat.private)
        shared = manifest.Shared(sharing.by, len(sharing.siblings), layout.shared_nbytes)
        whole = manifest.join(self._entries, self._tree_bytes, flat.plain, shared)
        return Plan(layout, whole, flat.private, sharing, self._pieces)

    def copy(self, flat: Flat, planned: Plan, slot: Slot, share: Slot | None = None) -> dict[Piece, int]:
        """Copy a state into a slot; returns once the live tensors may be changed again.

        Not collective. The slots are unsealed by this and stay so.

        Args:
            flat: the state.
            planned: where it goes.
            slot: of this rank.
            share: gets this rank's share of what it holds like others.

        Returns:
            The checksums of the pieces of other shares.

        Raises:
            SaveFailed: the pages of a slot are not there in time.
        """
        if planned.sharing is None:
            share = None
        for target in (slot,) if share is None else (slot, share):
            assert target.segment is not None
            if not target.segment.ready.wait(self._timeout_s):
                raise SaveFailed(f"the pages of {target.name} were not there after {self._timeout_s:g} s")
            target.unseal()
        reach("stage.unsealed")
        slot.view[PAGE_NBYTES : PAGE_NBYTES + len(planned.manifest)] = np.frombuffer(planned.manifest, dtype=np.uint8)
        small: dict[tuple[Any, Any], tuple[list[Any], list[Any]]] = {}
        for leaf, target in zip(flat.leaves, self._targets(planned, slot, share, flat), strict=True):
            value = leaf.value
            if target is None:
                continue
            if isinstance(value, np.ndarray):
                np.copyto(target, value)
            elif value.device.type == "cpu" and leaf.entry.nbytes >= _SMALL_NBYTES and _is_plain(value):
                np.copyto(as_bytes(target), as_bytes(value))
            else:
                targets, values = small.setdefault((value.dtype, value.device), ([], []))
                targets.append(target)
                values.append(value)
        if small:
            if any(device.type == "cuda" for _, device in small):
                for part in (slot, share):
                    if part is not None and part.segment is not None:
                        part.segment.pin()
            _copy_groups(small)
        checks = {} if share is None else _copy_pieces(flat, planned, share)
        reach("stage.copied")
        return checks

    def _targets(self, planned: Plan, slot: Slot, share: Slot | None, flat: Flat) -> list[Any]:
        """For each leaf, where the whole of it goes; None: it goes nowhere, or in pieces."""
        layout = planned.layout
        key = (slot.name, "" if share is None else share.name)
        segments = [part.segment for part in (slot, share) if part is not None and part.segment is not None]
        cached = self._views.get(key)
        # A new file may have the name of an old one: the views belong to the mapping, not to the name.
        if cached is None or cached[0] is not layout or cached[1] != segments:
            payload = slot.payload(layout.extents)
            _clear_gaps(layout, payload)
            targets: list[Any] = [
                from_bytes(entry, payload[entry.start : entry.start + entry.nbytes])
                if entry.nbytes and leaf.tie < 0 and not layout.is_shared(entry)
                else None
                for entry, leaf in zip(layout.entries, flat.leaves, strict=True)
            ]
            if share is not None:
                for piece, room in _own_pieces(planned, share):
                    if room.nbytes == layout.entries[piece.leaf].nbytes:
                        targets[piece.leaf] = from_bytes(layout.entries[piece.leaf], room)
            cached = self._views[key] = (layout, segments, targets)
        return cached[2]

    def replan(self) -> None:
        """Lay the next state out anew: what is shared may have changed. Not collective."""
        self._fingerprint = None

    def forget(self) -> None:
        """Drop the cached views (the slots were replaced)."""
        self._views.clear()


def _own_pieces(planned: Plan, share: Slot) -> list[tuple[Piece, np.ndarray]]:
    """The pieces that go into this rank's share, and where."""
    assert planned.sharing is not None and planned.share_extents is not None
    payload, number = share.payload(planned.share_extents), planned.sharing.share
    return [(p, payload[p.at : p.at + p.end - p.start]) for p in planned.pieces if p.share == number]


def _copy_pieces(flat: Flat, planned: Plan, share: Slot) -> dict[Piece, int]:
    """Copy the leaves of which only a piece is in this rank's share; returns the checksums of the other pieces."""
    assert planned.sharing is not None
    for piece, room in _own_pieces(planned, share):
        leaf = flat.leaves[piece.leaf]
        if room.nbytes < leaf.entry.nbytes:
            np.copyto(room, live_bytes(leaf.value)[piece.start : piece.end])
    checks = {}
    for piece in planned.pieces:
        if piece.share != planned.sharing.share:
            raw = live_bytes(flat.leaves[piece.leaf].value)[piece.start : piece.end]
            checks[piece] = xxhash.xxh3_64_intdigest(raw.data)
    return checks


def all_checks(planned: Plan, share: Slot, others: dict[Piece, int]) -> dict[int, int]:
    """For each leaf that is shared, one number for its bytes: those stored here, and those that are stored elsewhere.

    Args:
        planned: where the state was copied.
        share: with this rank's share.
        others: the checksums of the pieces that are not in it.
    """
    known = {p: xxhash.xxh3_64_intdigest(room.data) for p, room in _own_pieces(planned, share)}
    every = others | known
    of_leaf: dict[int, list[int]] = {}
    for piece in planned.pieces:
        of_leaf.setdefault(piece.leaf, []).append(every[piece])
    return {leaf: xxhash.xxh3_64_intdigest(np.array(checks, dtype="<u8").tobytes()) for leaf, checks in of_leaf.items()}


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


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def _copy_groups(groups: dict[tuple[Any, Any], tuple[list[Any], list[Any]]]) -> None:
    torch = sys.modules["torch"]
    devices = set()
    with torch.no_grad():
        for (_, device), (targets, values) in groups.items():
            torch._foreach_copy_(targets, values, non_blocking=device.type != "cpu")
            if device.type != "cpu":
                devices.add(device)
    for device in devices:
        getattr(torch, device.type).synchronize(device)
