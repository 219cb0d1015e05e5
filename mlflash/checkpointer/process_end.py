"""The end of a training's process: Checkpointers that were never closed, and errors of mlflash that nobody caught.

Checkpointers that are open are ended, because no thread may be inside MPI when mpi4py finalizes it. In a forked process
(a DataLoader's worker, `os.fork`) they are left alone: they belong to the parent, and nothing of them may be ended,
written or deleted there.

Of an error, one message is printed for all ranks, and the user's own lines. Most lines of a rank's traceback are inside
mlflash, and the same on all ranks. The event log has all of them.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import MlflashError

log = logging.getLogger("mlflash")

_open: weakref.WeakKeyDictionary[Any, tuple[Callable[[Any, str], None], Callable[[Any], None]]]
_open = weakref.WeakKeyDictionary()
_INSIDE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_rank = [0]  # of this process; until it is known, everything is printed


def add(checkpointer: Any, end: Callable[[Any, str], None], leave: Callable[[Any], None]) -> None:
    """End a Checkpointer at the interpreter's exit, if it is still open: ``end`` gets "failed" or "ended", too.

    In a forked process, ``leave`` gets it instead. Only the thread that forked exists there, and a lock that another
    thread held stays held forever.
    """
    _open[checkpointer] = end, leave


def discard(checkpointer: Any) -> None:
    """Forget one that was closed."""
    _open.pop(checkpointer, None)


@atexit.register
def _end_all() -> None:
    for checkpointer, (end, _) in list(_open.items()):
        try:
            end(checkpointer, "failed" if hasattr(sys, "last_value") else "ended")
        except Exception:  # the other Checkpointers must be ended, too
            log.exception("a Checkpointer could not be ended")
    if connection := sys.modules.get("mlflash.channel.connection"):
        connection.close_all()


def _leave_all() -> None:
    for checkpointer, (_, leave) in list(_open.items()):
        leave(checkpointer)
    _open.clear()


os.register_at_fork(after_in_child=_leave_all)


@functools.cache
def show_briefly() -> None:
    """Print uncaught errors of mlflash in this short form in this process; MLFLASH_TRACEBACK=full shows all lines."""
    sys.excepthook = functools.partial(_show, sys.excepthook)


def is_of_rank(rank: int) -> None:
    """Set the rank of this process."""
    _rank[0] = rank


def _show(before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, MlflashError) or os.environ.get("MLFLASH_TRACEBACK") == "full":
        before(kind, error, trace)
        return
    rank = _rank[0]
    if error.agreed and rank:
        text = f"mlflash: rank {rank} ends, as all ranks do: {kind.__name__}: {error.message.splitlines()[0]}\n"
    else:
        text = _brief(error, trace)
    sys.stderr.write(text)  # in one call, because other ranks write, too
    sys.stderr.flush()


def _brief(error: BaseException, trace: TracebackType | None) -> str:
    """Format an exception as Python does, without the lines inside mlflash."""
    formatted = traceback.TracebackException(type(error), error, trace)
    left_out, link = 0, formatted
    while link is not None:  # the error, its cause, the cause of that
        kept = [line for line in link.stack if not line.filename.startswith(_INSIDE)]
        left_out += len(link.stack) - len(kept)
        link.stack[:] = kept
        link.__context__ = None
        link = link.__cause__  # type: ignore[assignment]
    more = f"(MLFLASH_TRACEBACK=full shows {left_out} more lines, inside mlflash)\n" if left_out else ""
    return "".join(formatted.format()) + more
