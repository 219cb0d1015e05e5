"""Rank programs: one rank, or its courier, keeps the others waiting.

It stops itself (SIGSTOP) where the others wait for it, until the test lets it go on; or it is slow in a restore.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import patience
from records import OUT
from traps import set_traps
from waiting import PATIENCE_S, hang, take, until
from worker import COMM, RANK, differences, note, state_at, update

import mlflash

# Stops


STOPPED = COMM.size - 1
FOREVER_S = 3600
set_patience = functools.partial(patience.set_patience, rank=RANK)


def stop() -> None:
    """Stop this process, all of its threads, before the next line of this one: no other has to take the signal."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def wait_too_long(what: str, work: Callable[[], object]) -> None:
    """Note how a wait ends, and after how long."""
    started = time.monotonic()
    try:
        work()
        error: BaseException | None = None
    except mlflash.errors.MlflashError as problem:
        error = problem
    note(what, seconds=time.monotonic() - started, kind=type(error).__name__, text=str(error),
         ranks=getattr(error, "ranks", ()))  # fmt: skip


def grow(ckpt: mlflash.Checkpointer, what: str, step: int, nbytes: int, stop_s: float) -> None:
    """Save a state that needs larger slots, and so other windows, and once more when all have caught up."""
    set_patience(ckpt, seconds=FOREVER_S if RANK == STOPPED else stop_s)
    state, saved = state_at(RANK, step, nbytes), []

    def save() -> None:
        saved.append(ckpt.save(step, state))
        saved[0].wait()

    wait_too_long(what, save)
    set_patience(ckpt, seconds=FOREVER_S)
    until(lambda: saved[0].done, "the late save to end")
    until(lambda: not ckpt._courier.is_stuck, "the courier to come back")
    ckpt.save(step + 1, state).wait()
    note("caught up", step=step + 1)


def every_wait(stop_s: float, directory: str) -> None:
    """A courier is stopped in each call that the others wait in; in the end they leave without its rank."""
    patience.reach_into_courier(RANK)
    set_traps([{"path": path, "action": "stop", "rank": STOPPED}
               for path in (["commit.seen", "room.created"], ["drain.dealt"])], RANK)  # fmt: skip
    ckpt = mlflash.Checkpointer(directory)
    note("courier", process=ckpt._courier._connection.pid)
    ckpt.save(1, state_at(RANK, 1, 100_000)).wait()
    grow(ckpt, "before a call that blocks", 2, 1_000_000, stop_s)
    if RANK == STOPPED:
        patience.stop_in("Win_create", RANK)
    grow(ckpt, "inside of it", 4, 3_000_000, stop_s)

    # To be asked who does not answer takes time.
    set_patience(ckpt, seconds=FOREVER_S if RANK == STOPPED else 3 * stop_s)
    drain = ckpt.drain()
    wait_too_long("drain", drain.wait)
    wait_too_long("drain with a timeout", lambda: drain.wait(FOREVER_S))
    until(lambda: drain.done, "the drain to end")
    note("caught up", step=drain.wait().step)

    COMM.Barrier()
    set_patience(ckpt, seconds=stop_s)
    if RANK == STOPPED:
        stop()
    wait_too_long("close", ckpt.close)


def constructor(stop_s: float) -> None:
    """A rank is stopped where the others wait for it in the constructor, and never comes there."""
    with mlflash.Checkpointer():  # couriers start
        pass
    if RANK == STOPPED:
        stop()
    else:
        wait_too_long("constructor", lambda: mlflash.Checkpointer(timeout_s=stop_s))


# Slow restores


NBYTES = 300_000
PIECE_NBYTES, PIECES = 1024, 2  # what a slow file system gives in a second, and how often it does before it stops


class Stubborn:
    """An object whose state is loaded when the test lets it."""

    def __init__(self, hangs: bool):
        self._hangs = hangs

    def state_dict(self) -> dict[str, Any]:
        return {"value": RANK}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._hangs:
            until_others_have_left()


class _Note(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note("log", text=record.getMessage())


def until_others_have_left() -> None:
    """Wait until the other ranks have noted how their restore ended."""
    left = lambda: all((OUT / f"left{rank}").exists() for rank in range(COMM.size) if rank != RANK)
    until(left, "the other ranks to wait no more", PATIENCE_S / 2)


def be_slow(bound_to: str) -> None:
    """Let reads of large parts of files in a directory give a KB each second, and then nothing any more."""
    read, given = os.pread, []

    def slow(fd: int, nbytes: int, start: int) -> bytes:
        if nbytes < NBYTES or not os.readlink(f"/proc/self/fd/{fd}").startswith(bound_to):
            return read(fd, nbytes, start)
        if len(given) == PIECES:
            hang()
        given.append(start)
        take(1.0)
        return read(fd, PIECE_NBYTES, start)

    os.pread = slow


def save(directory: str) -> None:
    """Save a step and drain it."""
    with mlflash.Checkpointer(directory) as ckpt:
        ckpt.save(1, {"state": state_at(RANK, 1, NBYTES), "object": Stubborn(False)}).wait()
        ckpt.drain().wait()


def restore(directory: str, timeout_s: float, slow: int = -1, how: str = "") -> None:
    """Restore, and note how long that took, how it ended, and which bits are wrong."""
    logging.getLogger("mlflash").addHandler(_Note())
    state = state_at(RANK, 0, NBYTES)
    with mlflash.Checkpointer(directory, timeout_s=timeout_s) as ckpt:
        if slow == RANK and how == "reads":
            be_slow(directory)
        if slow == RANK and how == "comes":
            until_others_have_left()
        start, error, step = time.monotonic(), None, None
        try:
            step = ckpt.restore({"state": state, "object": Stubborn(slow == RANK and how == "loads")})
        except mlflash.errors.MlflashError as problem:
            error = problem
        wrong = differences(state, state_at(RANK, step or 0, NBYTES))
        note("restored", step=step, seconds=time.monotonic() - start, kind=type(error).__name__, text=str(error),
             ranks=[] if error is None else error.ranks, wrong=wrong)  # fmt: skip
        (OUT / f"left{RANK}").touch()
        if error is not None:
            raise SystemExit
        update(state, state_at(RANK, 2, NBYTES))
        ckpt.save(2, {"state": state, "object": Stubborn(False)}).wait()
    note("end")


if __name__ == "__main__":
    note("start")
    spec = json.loads(sys.argv[1])
    globals()[spec.pop("program")](**spec)
