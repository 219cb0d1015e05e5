"""Spares that are forked from a process that has imported all, and again with the rank that they turn out to need.

A model with a device mesh knows its rank, and a spare has made it before it gets one. So what waits is a child of the
process that was started (`fork_spares`), forked before anything that knows of ranks is made. Where it gets another rank
than it presumed (`begin_anew`), its parent, the *seed*, forks a new one, which imports nothing. The seed does nothing
else, and ends as its child does.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ..wireup.launcher_variables import PRESUMED, SEED
from ..wireup.own_process import end_with, set_name

_seed: int | None = None  # the descriptor of a socket, which is kept to the end of this process
_GO, _NO, _UNFIT = b"+", b"-", b"unfit"


def fork_spares(fits: Callable[[], bool]) -> None:
    """Go on in a child of this process, which becomes its seed. Not collective; on the main thread.

    Where this process has threads, which a child would not have, or its child does not fit, it goes on itself.

    Args:
        fits: says, in a child, whether the program can go on there.
    """
    me, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    before, drawn = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()), random.getstate()
    while True:
        ours, its = socket.socketpair()
        _flush()
        child = os.fork()
        if child == 0:
            ours.close()
            end_with(me)
            if its.recv(1) == _NO:
                os._exit(0)
            _begin(its.detach(), fits)
            set_name(name)
            random.setstate(drawn)  # which Python has seeded anew
            break
        its.close()
        # Libraries that can be forked, such as OpenBLAS, have ended their threads for it.
        is_alone = len(os.listdir("/proc/self/task")) == 1
        if is_alone:
            set_name(SEED)
        ours.sendall(_GO if is_alone else _NO)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = _said(ours)
        if not is_alone or said == _UNFIT:
            set_name(name)
            break
        if not said:
            os._exit(status if status >= 0 else 128 - status)
        os.environ[PRESUMED] = said.decode()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a seed leaves all signals to its child


def begin_anew(rank: int) -> NoReturn:
    """Run this program from `fork_spares` on, or all of it, with a rank that it knows from then on. Not collective.

    Args:
        rank: which.
    """
    _flush()
    if _seed is not None:
        _end(_seed, b"%d" % rank)
    os.environ[PRESUMED] = str(rank)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _begin(seed: int, fits: Callable[[], bool]) -> None:
    global _seed
    if not fits():
        _end(seed, _UNFIT)
    _seed = seed


def _end(seed: int, said: bytes) -> NoReturn:
    os.write(seed, said)
    os._exit(0)


def _said(ours: socket.socket) -> bytes:
    """What a child that has ended has said; what it has started may have the other end still."""
    with ours:
        ours.setblocking(False)
        try:
            return ours.recv(64)
        except BlockingIOError:
            return b""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
