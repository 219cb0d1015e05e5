"""What is done about those that were never closed: no thread may be inside MPI when mpi4py finalises it.

And about those of the parent in a process that was forked (a DataLoader's worker, `os.fork`): they are the parent's,
and nothing of them may be ended, written or deleted there.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger("mlflash")

_open: weakref.WeakKeyDictionary[Any, tuple[Callable[[Any, str], None], Callable[[Any], None]]]
_open = weakref.WeakKeyDictionary()


def add(one: Any, end: Callable[[Any, str], None], leave: Callable[[Any], None]) -> None:
    """Have something ended at the interpreter's exit, if it is still there.

    Args:
        one: it.
        end: does so; it, and "failed" or "ended", are given.
        leave: is called with it in a process that was forked, instead: only the thread that forked is there, and a lock
            that another one held is held for ever.
    """
    _open[one] = end, leave


def discard(one: Any) -> None:
    """Leave something to itself: it was closed."""
    _open.pop(one, None)


@atexit.register
def _end_all() -> None:
    for one, (end, _) in list(_open.items()):
        try:
            end(one, "failed" if hasattr(sys, "last_value") else "ended")
        except Exception:  # the others are to be ended, too
            log.exception("a Checkpointer could not be ended")
    if linked := sys.modules.get("mlflash.courier.linked"):
        linked.close_link()


def _leave_all() -> None:
    for one, (_, leave) in list(_open.items()):
        leave(one)
    _open.clear()


os.register_at_fork(after_in_child=_leave_all)
