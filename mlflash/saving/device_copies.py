"""Tensors on devices → the slot: copies that the device makes on a stream of its own.

They are made in pieces, so that one copy does not delay other traffic of the device for long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..memory.shared_memory_segment import Segment

_PIECE_NBYTES = 32 << 20  # half a millisecond of a fast link; each piece costs the host 10 us
_LOOK_S = 2e-4  # between two checks whether copies have ended: a wait in the driver would have no deadline

_streams: dict[Any, Any] = {}


class DeviceCopies:
    """Copies from one device to pinned memory, which begin when this is made.

    They come after everything that the caller's stream has been given so far. The tensors are kept until the copies are
    made; otherwise the caching allocator could give their memory to others.

    Args:
        segments: the files that the targets are in: each notes this as one of its writers.
    """

    def __init__(self, device: Any, targets: Sequence[Any], values: Sequence[Any], segments: Sequence[Segment] = ()):
        torch = sys.modules["torch"]
        self._event: Any = None
        for segment in segments:  # before the first copy begins, in case of an exception in between
            segment.writers.append(self)
        self._api, self._device = getattr(torch, device.type), device
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = self._api.Stream(device)
        stream.wait_stream(self._api.current_stream(device))
        self._values: list[Any] = []
        with self._api.stream(stream), torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                # Conjugate and negate now, if PyTorch has only marked the tensor for it: it would change the target
                # after the copy.
                value = value.detach().resolve_conj().resolve_neg()
                self._values.append(value)
                for into, part in _parts(target, value):
                    into.copy_(part, non_blocking=True)
            event = self._api.Event()
            event.record(stream)
        self._event = event

    @property
    def is_done(self) -> bool:
        return self._event is not None and bool(self._event.query())

    def hold_back(self) -> None:
        """Make what the caller's stream is given from now on come after the copies; the host does not wait."""
        self._api.current_stream(self._device).wait_event(self._event)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the copies are made; False if they are not made in time."""
        end = time.monotonic() + timeout_s
        while not self.is_done:
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_S)
        self._values.clear()
        return True


def _parts(target: Any, value: Any) -> list[tuple[Any, Any]]:
    nbytes = value.numel() * value.element_size()
    if nbytes <= _PIECE_NBYTES or not value.is_contiguous():
        return [(target, value)]
    step = _PIECE_NBYTES // value.element_size()
    return list(zip(target.view(-1).split(step), value.view(-1).split(step), strict=True))
