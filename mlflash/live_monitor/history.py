"""What was seen since `mlflash top` started: the times of saves, and how often there is a checkpoint."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from .rank_status import Look

_KEPT = 120  # checkpoints
_BARS = "▁▂▃▄▅▆▇█"


class History:
    """Stalls, commits and times of the checkpoints that were seen so far."""

    def __init__(self) -> None:
        self._step: int | None = None
        self.stalls: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self.commits: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._times: collections.deque[tuple[float, int]] = collections.deque(maxlen=_KEPT)

    def add(self, look: Look) -> None:
        """Add a look. It changes something only if it shows a new checkpoint."""
        step = committed(look)
        if step is None or step == self._step:
            return
        self._step = step
        heartbeats = [heartbeat for heartbeat in look.heartbeats if heartbeat["committed"] == step]
        self.stalls.append(max(float(heartbeat.get("stall_s", 0.0)) for heartbeat in heartbeats))
        self.commits.append(max(float(heartbeat.get("commit_s", 0.0)) for heartbeat in heartbeats))
        when = max(float(heartbeat.get("courier_beat") or heartbeat["beat"]) for heartbeat in heartbeats)
        self._times.append((when, min(int(p.get("saves", 0)) for p in heartbeats)))

    @property
    def every_s(self) -> float | None:
        """Average seconds between two checkpoints. None before there are two."""
        if len(self._times) < 2:
            return None
        (first, before), (last, after) = self._times[0], self._times[-1]
        return (last - first) / (after - before) if after > before and last > first else None


def committed(look: Look) -> int | None:
    """Return the newest step that all ranks in a look know to be a checkpoint."""
    steps = [heartbeat["committed"] for heartbeat in look.heartbeats]
    known = [int(step) for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None


def spark(values: Sequence[float], width: int) -> str:
    """Draw the last values as bars, from zero to the largest value.

    Example:
        ``spark([1, 2, 4], 10) == "▂▄█"``
    """
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[max(0, round(value / top * len(_BARS)) - 1)] for value in shown)
