"""What is done about those that were never closed: no thread may be inside MPI when mpi4py finalises it."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Any

_open: weakref.WeakKeyDictionary[Any, Callable[[Any, str], None]] = weakref.WeakKeyDictionary()


def add(one: Any, end: Callable[[Any, str], None]) -> None:
    """Have something ended at the interpreter's exit, if it is still there: it, and "failed" or "ended", are given."""
    _open[one] = end


def discard(one: Any) -> None:
    """Leave something to itself: it was closed."""
    _open.pop(one, None)


@atexit.register
def _end_all() -> None:
    for one, end in list(_open.items()):
        end(one, "failed" if hasattr(sys, "last_value") else "ended")
