"""Services of Linux for a process: to be killed when its parent ends, and to have a name."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# Loaded before any fork. None is the program itself, which contains the C library.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, or now if it has already ended.

    Args:
        parent: its process id, taken before this process was forked.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """Set the name that ``ps``, ``top`` and ``/proc/PID/comm`` show, at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
