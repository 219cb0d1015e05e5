"""What is printed if an error of mlflash ends a training: one message for all ranks, and the user's own lines.

Most lines of a rank's traceback are inside mlflash, and the same on all ranks. The event log has all of them.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from ..errors import MlflashError

_INSIDE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_rank = [0]  # of this process; until it is known, everything is printed


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
        text = brief(error, trace)
    sys.stderr.write(text)  # in one call, because other ranks write, too
    sys.stderr.flush()


def brief(error: BaseException, trace: TracebackType | None) -> str:
    """Format an exception as Python does, without the lines inside mlflash."""
    told = traceback.TracebackException(type(error), error, trace)
    left_out, one = 0, told
    while one is not None:
        kept = [line for line in one.stack if not line.filename.startswith(_INSIDE)]
        left_out += len(one.stack) - len(kept)
        one.stack[:] = kept
        one.__context__ = None
        one = one.__cause__  # type: ignore[assignment]
    more = f"(MLFLASH_TRACEBACK=full shows {left_out} more lines, inside mlflash)\n" if left_out else ""
    return "".join(told.format()) + more
