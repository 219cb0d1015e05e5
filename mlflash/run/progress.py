"""Whether this rank makes progress: the collectives that it begins, and its saves. A thread says when there is none.

How long a rank may take follows from its own steps: `_STEPS` times the median of the times between its saves, but at
least a number of seconds that the user sets. `run.membership` decides who hangs, from what all ranks say.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ..events import Event

_STEPS = 10  # a rank may take as long as so many of its steps
_SEEN = 2  # times between saves that must be known; before that a rank may take longer, because it may compile
_FIRST = 10
_LOOKS = 8  # in the time that a rank may take
_KEPT = 31  # times between saves
# Where code lies that is not the program's own.
_FOREIGN = (str(Path(__file__).parents[1]), str(Path(threading.__file__).parent), "<")


class Progress:
    """The progress of this process. Any thread.

    Attributes:
        count: collectives that were begun in groups of all ranks.
        what: the last one of any group, or "save".
        limit_s: how long this rank may take without progress, seconds.
        waits: says whether a collective that was begun has not ended.
    """

    def __init__(self) -> None:
        self.count, self.what, self._at = 0, "", time.monotonic()
        self.limit_s = float("inf")
        self.waits: Callable[[], bool] = lambda: False
        self._saved_at: float | None = None
        self._intervals: deque[float] = deque(maxlen=_KEPT)

    def begin(self) -> None:
        """Count from zero: a round begins."""
        self.count, self.what, self._at, self._saved_at = 0, "the first step", time.monotonic(), None

    def collective(self, name: str, of_all: bool) -> None:
        """Note that this rank begins a collective."""
        self.count += of_all
        self.what, self._at = name, time.monotonic()

    def saved(self) -> None:
        """Note that this rank has saved."""
        now = time.monotonic()
        if self._saved_at is not None:
            self._intervals.append(now - self._saved_at)
        self.what, self._at, self._saved_at = "save", now, now

    def set_limit(self, least_s: float) -> float:
        """Compute ``limit_s`` from the steps so far, and return it."""
        if len(self._intervals) < _SEEN:
            self.limit_s = _FIRST * least_s
        else:
            self.limit_s = max(least_s, _STEPS * statistics.median(self._intervals))
        return self.limit_s

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._at

    def described(self) -> dict[str, Any]:
        """Say where this process is, as plain data."""
        return {"count": self.count, "idle": round(self.idle_s, 3), "limit": self.limit_s, "waits": self.waits(),
                "after": self.what, "where": where()}  # fmt: skip


progress = Progress()


def where() -> str:
    """The line of the program in which the main thread is, such as "train.py:88 (forward)"."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return _named(frame or innermost)


def _is_foreign(file: str) -> bool:
    return file.startswith(_FOREIGN) or "/site-packages/" in file


def _named(frame: FrameType | None) -> str:
    if frame is None:
        return "no Python code"
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"


class ProgressWatch:
    """A thread that calls a function once whenever this process has made no progress for too long. End it.

    Args:
        least_s: seconds; see `Progress.set_limit`. 0: it never calls.
    """

    def __init__(self, least_s: float, stuck: Callable[[], None]):
        self._least_s, self._stuck, self._over = least_s, stuck, Event()
        if least_s:
            progress.set_limit(least_s)
            threading.Thread(target=self._watch, name="mlflash-progress", daemon=True).start()

    def end(self) -> None:
        """Let the thread end."""
        self._over.set()

    def _watch(self) -> None:
        said = -1.0  # when the progress was after which this was said
        while not self._over.wait(self._least_s / _LOOKS):
            if progress.idle_s > progress.set_limit(self._least_s) and said != progress._at:
                said = progress._at
                self._stuck()
