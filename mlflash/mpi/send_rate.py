"""How fast the courier sends during training: as fast as it can, at a fixed rate, or as fast as steps allow.

In the last case the rate follows its effect on training, as the rate of TCP follows its effect on a network. It goes
down at once by a fixed share when steps take longer than allowed, and slowly up otherwise (AIMD, Chiu and Jain, 1989).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from .nonblocking import Operation

_IDLE_STEPS, _LEAST_IDLE = 32, 5  # steps without sending, with which the others are compared
_BUSY_STEPS, _SENDS = 8, 4  # steps with sending, and transfers, after which a long save adjusts its rate
_DOWN, _UP = 0.7, 1.1
_SHARE_OF_INTERVAL = 0.8  # a save may take this share of the time between two saves: if it takes longer, training waits


class SendRate:
    """Limits how many bytes per second the courier sends.

    Args:
        rate: bytes per second of this rank; 0: no limit.
        max_slowdown: allowed slowdown of a training step, such as 0.03; 0: not considered.
        timeout_s: a save must end within this time.
    """

    def __init__(self, rate: float, max_slowdown: float, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self._most = rate or float("inf")
        self._aim, self._timeout_s, self._clock = max_slowdown, timeout_s, clock
        self.rate = self._most
        self.slowdown: float | None = None
        self._free_at = 0.0
        self._began: float | None = None  # start of the current save, or of the last one
        self._interval_s = float("inf")  # time between the last two saves
        self._sending = False
        self._sent = self._nbytes = 0  # bytes of this save, and of the one before
        self._sends = self._seen = 0  # transfers so far, and at the last adjustment of the rate
        self._fastest = 0.0  # highest number of bytes per second reached
        self._step_at: float | None = None
        self._was_sending = False  # since that step
        self._idle: deque[float] = deque(maxlen=_IDLE_STEPS)
        self._busy: list[float] = []
        self._thought = False  # whether the rate was adjusted since this save began

    def begin(self) -> None:
        """Note that a save is being sent from now on."""
        now = self._clock()
        if self._began is not None:
            self._interval_s = now - self._began
        self._began, self._sent = now, 0
        self._thought = False
        self._sending = self._was_sending = True

    def end(self) -> None:
        assert self._began is not None
        self._fastest = max(self._fastest, self._reached())
        self._nbytes, self._sending = self._sent, False

    def send(self, nbytes: int) -> Operation:
        """Wait until bytes may be sent. For the courier."""
        self._sent += nbytes
        if self.rate < float("inf"):
            while self._clock() < self._free_at:
                yield False
            self._free_at = max(self._free_at, self._clock() - 1e-3) + nbytes / self.rate
        self._sends += 1

    def stalled(self, seconds: float) -> None:
        """Note that training waited in `save`, which is no slowdown of a step. On the thread of training."""
        if self._step_at is not None:
            self._step_at += seconds

    def step(self) -> None:
        """Note that a training step ends. On the thread of training; it takes a microsecond.

        A transfer slows the steps during which it runs, and there may be steps without a transfer in between. So a long
        save is judged in spans of several transfers, and the rest of it together with the next save. A short save is
        judged as a whole.
        """
        now, before, busy = self._clock(), self._step_at, self._was_sending
        self._step_at, self._was_sending = now, self._sending
        if before is None or not self._aim:
            return
        if not busy:
            self._idle.append(now - before)
            enough = not self._thought
        else:
            self._busy.append(now - before)
            enough = len(self._busy) >= _BUSY_STEPS and self._sends - self._seen >= _SENDS
        if enough and self._busy and len(self._idle) >= _LEAST_IDLE:
            self._think_over()

    def _reached(self) -> float:
        """Bytes per second of the current save so far. Slightly too high, because some are still on their way."""
        seconds = self._clock() - (self._began or 0.0)
        return self._sent / seconds if seconds > 0 else 0.0

    def _think_over(self) -> None:
        self.slowdown = statistics.fmean(self._busy) / statistics.median(self._idle) - 1
        self._busy.clear()
        self._seen, self._thought = self._sends, True
        if self.slowdown > self._aim:
            fastest = self._fastest or self._reached() or self.rate  # the first save may still be running
            self.rate = max(self._floor(), min(self.rate, fastest) * _DOWN)
        elif self.slowdown < self._aim / 2 and self.rate < self._most:
            self.rate *= _UP
            if self._fastest and self.rate > 2 * self._fastest:
                self.rate = float("inf")
            self.rate = min(self.rate, self._most)

    def _floor(self) -> float:
        """The rate below which a save would not end in time."""
        seconds = min(self._timeout_s / 4, _SHARE_OF_INTERVAL * self._interval_s)
        return max(self._sent, self._nbytes) / seconds


AT_ONCE = SendRate(0, 0, 1)
"""For transfers that training waits for."""
