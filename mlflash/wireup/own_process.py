"""Services for processes of mlflash: how they are started, to be killed when their parent ends, and to have a name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# Loaded before any fork. None is the program itself, which contains the C library.
_libc = ctypes.CDLL(None, use_errno=True)


def running(module: str) -> list[str]:
    """The command that runs a module, and finds no other module in the working directory.

    With ``python -m``, a file ``tokenize.py`` in the working directory would be run in the place of Python's own.
    mlflash itself is found where this process has it.

    Args:
        module: its name; the arguments of the program follow the command.
    """
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; import runpy; " \
            f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"  # fmt: skip
    return [sys.executable, "-c", start]


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
