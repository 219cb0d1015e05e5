"""End the Checkpointers that were never closed: no thread may be inside MPI when mpi4py finalizes it.

Also leave alone those of the parent in a forked process (a DataLoader's worker, `os.fork`): they belong to the parent,
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
    """End an object at the interpreter's exit, if it is still open: ``end`` gets "failed" or "ended", too.

    In a forked process, ``leave`` gets it instead. Only the thread that forked exists there, and a lock that another
    thread held stays held forever.
    """
    _open[one] = end, leave


def discard(one: Any) -> None:
    """Forget an object that was closed."""
    _open.pop(one, None)


@atexit.register
def _end_all() -> None:
    for one, (end, _) in list(_open.items()):
        try:
            end(one, "failed" if hasattr(sys, "last_value") else "ended")
        except Exception:  # the other Checkpointers must be ended, too
            log.exception("a Checkpointer could not be ended")
    if connection := sys.modules.get("mlflash.courier.connection"):
        connection.close_all()


def _leave_all() -> None:
    for one, (_, leave) in list(_open.items()):
        leave(one)
    _open.clear()


os.register_at_fork(after_in_child=_leave_all)
