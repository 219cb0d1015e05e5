"""Spares: processes that are forked from one that has imported everything, and forked again once their rank is known.

A model with a device mesh knows its rank, and a spare makes the model before it gets a rank. So the process that waits
is a child of the process that was started (`fork_spares`), forked before anything that knows ranks is made. If it gets
another rank than it presumed (`begin_anew`), its parent, the *seed*, forks a new child. This child imports nothing,
because the seed has meanwhile imported what the previous child had imported (`is_ready`). The seed does nothing else,
and ends in the same way as its child.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ..launch.launcher_variables import PRESUMED, SEED
from ..launch.own_process import end_with, set_name

_seed: int | None = None  # descriptor of a socket; it stays open until this process ends
_GO, _NO = b"+", b"-"
_UNFIT, _IMPORTED = "unfit", "imported "


def fork_spares(fits: Callable[[], bool]) -> None:
    """Continue in a child of this process, which becomes the child's seed. Not collective; on the main thread.

    This process continues itself if it has threads, which a child would not have, or if its child does not fit.
    """
    global _seed
    me, name, drawn = os.getpid(), Path("/proc/self/comm").read_text().strip(), random.getstate()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the seed leaves signals to its child
    while True:
        seed_end, child_end = socket.socketpair()
        _flush()
        child = os.fork()
        if child == 0:
            seed_end.close()
            end_with(me)
            if child_end.recv(1) != _GO:
                os._exit(0)
            set_name(name)
            random.setstate(drawn)  # Python seeds the generator anew in a child
            _seed = child_end.detach()
            if not fits():
                _say(_seed, _UNFIT)
                os._exit(0)
            break
        child_end.close()
        # Libraries that allow forks, such as OpenBLAS, have ended their threads before the fork.
        is_alone = len(os.listdir("/proc/self/task")) == 1
        set_name(SEED if is_alone else name)
        with seed_end:
            seed_end.sendall(_GO if is_alone else _NO)
            last = _serve(child, seed_end)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if last.isdecimal():
            os.environ[PRESUMED] = os.environ["RANK"] = last
        elif is_alone and last != _UNFIT:
            os._exit(status if status >= 0 else 128 - status)
        else:
            set_name(name)
            break
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_ready() -> None:
    """Tell the seed of this process what was imported since, so that the next child has it."""
    if _seed is not None:
        _say(_seed, _IMPORTED + " ".join(sys.modules))


def begin_anew(rank: int) -> NoReturn:
    """Run this program again, from `fork_spares` on or from its start, with a known rank."""
    _flush()
    if _seed is not None:
        _say(_seed, str(rank))
        os._exit(0)
    os.environ[PRESUMED] = os.environ["RANK"] = str(rank)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _say(seed: int, line: str) -> None:
    os.write(seed, f"{line}\n".encode())


def _serve(child: int, seed_end: socket.socket) -> str:
    """Do what a child asks for until it has ended; return its last line."""
    pidfd, text, last = os.pidfd_open(child), b"", ""
    heard, has_ended = [seed_end.fileno()], False
    seed_end.setblocking(False)
    while not has_ended:
        has_ended = pidfd in select.select([pidfd, *heard], [], [])[0]
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while received := seed_end.recv(1 << 16):  # children of the child may keep the other end open
                text += received
            heard = []
        *lines, text = text.split(b"\n")
        for line in lines:
            last = line.decode()
            if last.startswith(_IMPORTED):
                _import(last.split()[1:])
    os.close(pidfd)
    return last


def _import(names: Sequence[str]) -> None:
    for name in names:
        if name not in sys.modules and name.partition(".")[0] in sys.modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
