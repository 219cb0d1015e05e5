"""An exception at any moment of some work, as a signal handler raises it."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """What a signal handler raises."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage: finalizers of what other tests have left would run in the middle of the work."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interrupted(call: Callable[[], object], nth: int) -> bool:
    """Call something, and raise at the nth event of any Python code in it; return whether there was such an event."""
    left = [nth]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Interrupted
        return trace

    with uncollected():
        sys.settrace(trace)
        try:
            call()
        except Interrupted:
            return True
        finally:
            sys.settrace(None)
    return False
