"""How fast the courier sends while training goes on: as fast as it can, at a rate, or as fast as steps bear.

In the last case the rate follows what it does to training, as TCP's follows what it does to a network: it goes down by
a share at once when steps take longer than they may, and up by little while they do not (AIMD, Chiu and Jain, 1989).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from .nonblocking import Operation

_IDLE_STEPS, _LEAST_IDLE = 32, 5  # steps without courier that the others are compared with
_BUSY_STEPS, _SENDS = 8, 4  # steps with it, and transfers, after which the rate is thought over in a long save
_DOWN, _UP = 0.7, 1.1
_SHARE_OF_INTERVAL = 0.8  # of the time between two saves: a save that is not through by then makes training wait


class SendRate:
    """Lets the courier send so and so many bytes per second.

    Args:
        rate: bytes per second of this rank; 0: no limit.
        max_slowdown: of a training step, such as 0.03; 0: nobody looks.
        timeout_s: a save must be through by then.
        clock: seconds.
    """

    def __init__(self, rate: float, max_slowdown: float, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self._most = rate or float("inf")
        self._aim, self._timeout_s, self._clock = max_slowdown, timeout_s, clock
        self.rate = self._most
        self.slowdown: float | None = None
        self._free_at = 0.0
        self._began: float | None = None  # when the save was, that is being sent or was last
        self._interval_s = float("inf")  # between the last two
        self._sending = False
        self._sent = self._nbytes = 0  # bytes, by this save, and by the one before
        self._sends = self._seen = 0  # transfers so far, and when the rate was thought over
        self._fastest = 0.0  # bytes per second that were reached
        self._step_at: float | None = None
        self._was_sending = False  # since then
        self._idle: deque[float] = deque(maxlen=_IDLE_STEPS)
        self._busy: list[float] = []
        self._thought = False  # whether the rate was thought over since this save began

    def begin(self) -> None:
        """Note that a save is being sent from now on."""
        now = self._clock()
        if self._began is not None:
            self._interval_s = now - self._began
        self._began, self._sent = now, 0
        self._thought = False
        self._sending = self._was_sending = True

    def end(self) -> None:
        """Note that it is sent."""
        assert self._began is not None
        self._fastest = max(self._fastest, self._reached())
        self._nbytes, self._sending = self._sent, False

    def send(self, nbytes: int) -> Operation:
        """Wait until bytes may be sent; for the courier."""
        self._sent += nbytes
        if self.rate < float("inf"):
            while self._clock() < self._free_at:
                yield False
            self._free_at = max(self._free_at, self._clock() - 1e-3) + nbytes / self.rate
        self._sends += 1

    def stalled(self, seconds: float) -> None:
        """Note that training waited in `save`: that is none of what sending does to a step; on its thread."""
        if self._step_at is not None:
            self._step_at += seconds

    def step(self) -> None:
        """Note that training comes to a step's end; on its thread, in a microsecond.

        A transfer slows the steps that it falls on, and none between two of them. So a long save is looked at in spans
        of several transfers, what is left of it together with the next one, and a short one as a whole.
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
        """Bytes per second of the save in flight so far: a little too many, as some are on their way only."""
        seconds = self._clock() - (self._began or 0.0)
        return self._sent / seconds if seconds > 0 else 0.0

    def _think_over(self) -> None:
        self.slowdown = statistics.fmean(self._busy) / statistics.median(self._idle) - 1
        self._busy.clear()
        self._seen, self._thought = self._sends, True
        if self.slowdown > self._aim:
            fastest = self._fastest or self._reached() or self.rate  # the very first save may take long
            self.rate = max(self._floor(), min(self.rate, fastest) * _DOWN)
        elif self.slowdown < self._aim / 2 and self.rate < self._most:
            self.rate *= _UP
            if self._fastest and self.rate > 2 * self._fastest:
                self.rate = float("inf")
            self.rate = min(self.rate, self._most)

    def _floor(self) -> float:
        """The rate below which a save would not be through in time."""
        seconds = min(self._timeout_s / 4, _SHARE_OF_INTERVAL * self._interval_s)
        return max(self._sent, self._nbytes) / seconds


AT_ONCE = SendRate(0, 0, 1)
"""For what training waits for."""
