"""Where the leaves of a state go in one slot, and how: at once, or later.

Large contiguous CPU tensors go through ``np.copyto`` (memcpy on one thread; torch's OpenMP copy is up to 26 times
slower if ranks compete for cores). Small ones go through one ``torch._foreach_copy_`` per dtype, and those on other
devices through a `DeviceCopies`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import SaveFailed, StateError
from ..memory.copy_threads import CopyThreads
from ..memory.memory_limits import available, headroom
from ..memory.shared_memory_segment import Segment
from ..state.layout import Layout, plan
from ..state.leaves import Flat, Structure, as_bits, as_bytes, from_bytes, is_copied_as_bytes, kept_bytes, live_bytes
from .deferred_copies import LARGE_NBYTES, DeviceCopies, SampledBytes, Work

_PIECE_NBYTES = 8 << 20  # the longest wait of training if the courier is in the middle of a piece


class CopyPlan:
    """Where the leaves go in one slot, and how; ``targets``: a view for each; None: nowhere, or in pieces."""

    def __init__(
        self, layout: Layout, segments: list[Segment], targets: list[Any], copy_threads: CopyThreads, timeout_s: float
    ):
        self.layout, self.segments, self._targets = layout, segments, targets
        self._copy_threads, self._timeout_s = copy_threads, timeout_s
        self._structure: Structure | None = None
        self._lazy: frozenset[int] = frozenset()

    def lead(self, flat: Flat, lazy: frozenset[int]) -> None:
        """Choose how each leaf of a state is copied; states of the very same structure are copied the same way."""
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

    def begin(self, values: list[Any], samples: SampledBytes) -> tuple[list[Work], list[DeviceCopies]]:
        """Begin what is copied later; return the pieces still to be copied, and the copies that devices are making.

        Both use the places where the bytes are now, because a parameter may get other memory meanwhile (FSDP does
        that).
        """
        pieces: list[Work] = []
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
    way = CopyPlan(layout, [], [value if tie < 0 else None for value, tie in zip(values, ties, strict=True)],
                   copy_threads, timeout_s=0.0)  # no leaf is on a device  # fmt: skip
    way.lead(flat, frozenset())
    way.copy(flat.values)
    return Flat(flat.structure, values, flat.plain, flat.wholes)
