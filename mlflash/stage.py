"""Tensors → slot: the only part of a save that training waits for.

In the steady state nothing is planned, allocated or faulted in: the layout is cached by a fingerprint of the
structure, the destination views by slot. Large contiguous CPU tensors go through ``np.copyto`` (memcpy on one
thread; torch's OpenMP copy is up to 26 times slower where ranks fight for cores), small ones and those on
other devices through one ``torch._foreach_copy_`` per dtype and device.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from . import manifest
from .errors import SaveFailed
from .layout import PAGE_NBYTES, Layout, fingerprint, plan
from .points import reach
from .segment import Segment
from .slot import Slot
from .state import Flat, as_bytes, from_bytes

_SMALL_NBYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a state goes, and the manifest that says so."""

    layout: Layout
    manifest: bytes
    private: frozenset[str]


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
        self._entries = self._tree_bytes = b""
        self._views: dict[str, tuple[Layout, Segment, list[Any]]] = {}

    def plan(self, flat: Flat) -> Plan:
        """Lay a state out, or find that it is laid out like the one before. Not collective."""
        seen = fingerprint(flat)
        known = self._layout is not None and seen == self._fingerprint
        if not known or flat.tree != self._tree:
            self._tree, self._tree_bytes = flat.tree, manifest.encode_tree(flat.tree)
        if known and self._layout is not None:
            whole = manifest.join(self._entries, self._tree_bytes, flat.plain)
            if len(whole) <= self._layout.extents.manifest_room:
                return Plan(self._layout, whole, flat.private)
        # The entries' text depends on their places; twice the text of unplaced ones is room enough.
        draft = manifest.encode_entries(tuple(leaf.entry for leaf in flat.leaves))
        length = len(manifest.join(draft, self._tree_bytes, flat.plain)) + 20 * len(flat.leaves)
        self._layout = plan(flat, length, self._block_nbytes)
        self._fingerprint = seen
        self._entries = manifest.encode_entries(self._layout.entries)
        self._views.clear()
        whole = manifest.join(self._entries, self._tree_bytes, flat.plain)
        return Plan(self._layout, whole, flat.private)

    def copy(self, flat: Flat, planned: Plan, slot: Slot) -> None:
        """Copy a state into a slot; returns once the live tensors may be changed again.

        Not collective. The slot is unsealed by this and stays so.

        Raises:
            SaveFailed: the pages of the slot are not there in time.
        """
        assert slot.segment is not None
        if not slot.segment.ready.wait(self._timeout_s):
            raise SaveFailed(f"the pages of {slot.name} were not there after {self._timeout_s:g} s")
        slot.unseal()
        reach("stage.unsealed")
        slot.view[PAGE_NBYTES : PAGE_NBYTES + len(planned.manifest)] = np.frombuffer(planned.manifest, dtype=np.uint8)
        small: dict[tuple[Any, Any], tuple[list[Any], list[Any]]] = {}
        for leaf, target in zip(flat.leaves, self._targets(planned.layout, slot, flat), strict=True):
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
                slot.segment.pin()
            _copy_groups(small)
        reach("stage.copied")

    def _targets(self, layout: Layout, slot: Slot, flat: Flat) -> list[Any]:
        assert slot.segment is not None
        cached = self._views.get(slot.name)
        # A new file may have the name of an old one: the views belong to the mapping, not to the name.
        if cached is None or cached[0] is not layout or cached[1] is not slot.segment:
            payload = slot.payload(layout.extents)
            _clear_gaps(layout, payload)
            targets = [
                from_bytes(entry, payload[entry.start : entry.start + entry.nbytes])
                if entry.nbytes and leaf.tie < 0
                else None
                for entry, leaf in zip(layout.entries, flat.leaves, strict=True)
            ]
            cached = self._views[slot.name] = (layout, slot.segment, targets)
        return cached[2]

    def forget(self) -> None:
        """Drop the cached views (the slots were replaced)."""
        self._views.clear()


def _clear_gaps(layout: Layout, payload: np.ndarray) -> None:
    """Zero the bytes between the extents, so that equal states give equal blocks."""
    at = 0
    for entry in layout.entries:
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
