"""Sampled bytes of what is copied later, noted at once: the copy must have the same bytes.

Torch counts writes to a tensor, but not all of them (`parameter.data`, a custom kernel, NumPy on the same memory). Such
a write to a whole tensor changes nearly every byte of it, and so a few bytes are enough to find it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..state.leaves import flat_bytes

_APART_NBYTES, _LEAST = 128 << 10, 16  # one byte in each run of so many, but at least so many per part


class SampledBytes:
    """Some bytes of the parts of a state that are copied later."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._lives: list[np.ndarray] = []
        self._rooms: list[np.ndarray] = []
        self._noted: np.ndarray = np.empty(0, dtype=np.uint8)
        self._elsewhere: list[tuple[Any, list[str], list[np.ndarray]]] = []

    def add(self, name: str, live: np.ndarray, room: np.ndarray) -> None:
        """Add a part in the host's memory: its live bytes, and the room that they are copied to."""
        step = _step(room.nbytes)
        self._names.append(name)
        self._lives.append(live[::step])
        self._rooms.append(room[::step])

    def note(self) -> None:
        """Note the bytes of what was added."""
        self._noted = _together(self._lives)
        self._lives.clear()

    def note_on(self, device: Any, names: list[str], values: list[Any], rooms: list[np.ndarray]) -> tuple[Any, Any]:
        """Note bytes of tensors on a device, on its current stream.

        Args:
            values: the tensors, contiguous.
            rooms: where they are copied to, as bytes.

        Returns:
            A CPU tensor, and one on the device that must be copied into it before `changed` is called.
        """
        torch = sys.modules["torch"]
        with torch.no_grad():
            samples = [
                flat_bytes(value.detach())[:: _step(room.nbytes)] for value, room in zip(values, rooms, strict=True)
            ]
            noted = torch.cat(samples)
        into = torch.empty(noted.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._elsewhere.append((into, names, [room[:: _step(room.nbytes)] for room in rooms]))
        return into, noted

    def changed(self) -> str | None:
        """Return the name of a tensor whose copy does not have the noted bytes; None if all have them."""
        found = _first_unlike(self._noted, self._names, self._rooms)
        for into, names, rooms in self._elsewhere:
            found = found or _first_unlike(into.numpy(), names, rooms)
        return found


def _step(nbytes: int) -> int:
    # Odd, so that every byte of a number is sampled somewhere: a small change alters the last ones only.
    return max(1, min(_APART_NBYTES, nbytes // _LEAST)) | 1


def _together(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


def _first_unlike(noted: np.ndarray, names: list[str], rooms: list[np.ndarray]) -> str | None:
    if np.array_equal(noted, _together(rooms)):
        return None
    at = 0
    for name, room in zip(names, rooms, strict=True):
        if not np.array_equal(noted[at : at + len(room)], room):
            return name
        at += len(room)
    raise AssertionError("bytes differ in no part")
