"""A rank program: the last rank stops itself (SIGSTOP) where the others wait for it, until the test lets it go on."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from records import OUT
from waiting import until
from worker import COMM, RANK, note, set_patience, state_at

import mlflash
from mlflash import crash_points
from mlflash.mpi import job_thread

STOPPED = COMM.size - 1
FOREVER_S = 3600


def stop() -> None:
    """Stop this process, all of its threads, before the next line of this one: no other has to take the signal."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def stop_before(one: Any, name: str, is_it: Callable[..., bool] = lambda *given: True) -> None:
    """Stop when a method is called, once."""
    method = getattr(one, name)

    @functools.wraps(method)
    def call(*given: Any) -> Any:
        if is_it(*given):
            setattr(one, name, method)
            stop()
        return method(*given)

    setattr(one, name, call)


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
    set_patience(ckpt, FOREVER_S if RANK == STOPPED else stop_s)
    state, saved = state_at(RANK, step, nbytes), []

    def save() -> None:
        saved.append(ckpt.save(step, state))
        saved[0].wait()

    wait_too_long(what, save)
    set_patience(ckpt, FOREVER_S)
    until(lambda: saved[0].done, "the late save to end")
    until(lambda: not ckpt._courier.is_stuck, "the courier to come back")
    ckpt.save(step + 1, state).wait()
    note("caught up", step=step + 1)


def every_wait(stop_s: float, directory: str) -> None:
    """A rank is stopped in each call that the others wait in; in the end they leave without it."""
    ckpt = mlflash.Checkpointer(directory)
    ckpt.save(1, state_at(RANK, 1, 100_000)).wait()
    if RANK == STOPPED:
        stop_before(ckpt._courier.session.context.protection, "open_windows")
    grow(ckpt, "before a call that blocks", 2, 1_000_000, stop_s)
    if RANK == STOPPED:
        stop_before(ckpt._courier.session.context.world, "within", lambda call: call == "Win_create")
    grow(ckpt, "inside of it", 4, 3_000_000, stop_s)

    set_patience(ckpt, FOREVER_S if RANK == STOPPED else 3 * stop_s)  # to be asked who does not answer takes time
    if RANK == STOPPED:
        crash_points.arm(lambda name: stop() if name == "drain.dealt" else None)
    drain = ckpt.drain()
    wait_too_long("drain", drain.wait)
    wait_too_long("drain with a timeout", lambda: drain.wait(FOREVER_S))
    crash_points.arm(None)
    until(lambda: drain.done, "the drain to end")
    note("caught up", step=drain.wait().step)

    COMM.Barrier()
    set_patience(ckpt, stop_s)
    if RANK == STOPPED:
        stop()
    wait_too_long("close", ckpt.close)


def constructor(stop_s: float) -> None:
    """A rank comes to the constructor when the others have left it, and stops once more; an exception ends all."""
    if RANK == STOPPED:
        stop()
    wait_too_long("constructor", lambda: mlflash.Checkpointer(timeout_s=stop_s))
    (OUT / f"left{RANK}").touch()
    if RANK == STOPPED:
        stop()
    until((OUT / f"left{STOPPED}").exists, "all to have left")
    raise RuntimeError("this rank has nothing to wait for any more")


if __name__ == "__main__":
    note("start")
    job_thread._GRACE_S = 1.0
    spec = json.loads(sys.argv[1])
    globals()[spec.pop("program")](**spec)
