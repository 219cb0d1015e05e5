"""A rank program: one rank keeps the others waiting in a restore, in one of several ways."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

from records import OUT
from waiting import PATIENCE_S, hang, take, until
from worker import COMM, RANK, differences, note, state_at, update

import mlflash

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
