"""What Linux does for a process that asks for it: to be killed when its parent ends, and a name of its own."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# Loaded before any fork. None is the program itself, whose C library is there already.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, which it may have done already.

    Args:
        parent: process id of it, taken before this process was forked.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """Have ``ps``, ``top`` and ``/proc/PID/comm`` show a name, of at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
