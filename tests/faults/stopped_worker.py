"""A rank program: the last rank, or its courier, stops itself (SIGSTOP) where the others wait for it.

The test lets it go on.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable

import patience
from traps import set_traps
from waiting import until
from worker import COMM, RANK, note, state_at

import mlflash

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


if __name__ == "__main__":
    note("start")
    spec = json.loads(sys.argv[1])
    globals()[spec.pop("program")](**spec)
