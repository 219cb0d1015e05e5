"""How the tests wait: for a condition, never for a time, so that a busy machine makes them slower and not red.

Nothing else in tests/ sleeps. It imports nothing of ours: rank programs, and what runs on the nodes of a cluster, use
it too.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 90.0  # below the 120 s that a test has, so that what was waited for is said
_LOOK_S = 0.01


def until(condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = PATIENCE_S,
          look_s: float = _LOOK_S) -> T:  # fmt: skip
    """Wait until a condition is true, and return what it returned.

    Args:
        condition: is asked again and again; cheap, and without side effects.
        what: says what was waited for, or is called to say it, if it does not come.
        timeout_s: for a machine that hangs, not for one that is busy.
        look_s: between two looks, where they cost what others need.

    Raises:
        AssertionError: it did not become true.
    """
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() >= end:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s:g} s: {said}")
        time.sleep(look_s)
    return found


def is_in(thread: threading.Thread, function: Callable[..., object]) -> bool:
    """Whether a thread of this process is in a call of a Python function just now: it waits there, where that waits."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def hang() -> None:
    """Never return, as a program that is stuck; whoever started it ends it."""
    while True:
        time.sleep(1000)


def take(seconds: float) -> None:
    """Take time, as a training step does. Nothing that a test asserts may depend on how long it really is."""
    time.sleep(seconds)
