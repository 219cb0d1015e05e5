"""How fast the courier sends during training: as fast as it can, or at a fixed rate."""

from __future__ import annotations

import time
from collections.abc import Callable

from .nonblocking import Operation


class SendRate:
    """Limits how many bytes per second the courier sends.

    Args:
        rate: bytes per second of this rank; 0: no limit.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self._clock = rate, clock
        self._free_at = 0.0

    def send(self, nbytes: int) -> Operation:
        """Wait until bytes may be sent. For the courier."""
        if self.rate:
            while self._clock() < self._free_at:
                yield False
            self._free_at = max(self._free_at, self._clock() - 1e-3) + nbytes / self.rate


AT_ONCE = SendRate(0)
"""For transfers that training waits for."""
