"""Deadlines that change while a rank trains, in it and in its courier, and calls of MPI where its courier stops."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import traps
from traps import OUT

from mlflash.mpi import job_thread
from mlflash.mpi.deadlines import Waits

_GRACE_S = 1.0  # that a courier has which is held in a call of MPI


def reach_into_courier(rank: int) -> None:
    """Let deadlines of this rank change. Before it has a courier; `traps.set_traps` may follow."""
    traps.set_traps([], rank)
    os.environ["MLFLASH_TEST_ARMS"] = "patience"


def set_patience(ckpt: Any, rank: int, seconds: float) -> None:
    """Change timeout_s from now on, so that no deadline passes but the one that is meant to."""
    new = OUT / f"new-patience-{rank}"
    new.write_text(str(seconds))
    new.rename(_patience_of(rank))
    object.__setattr__(ckpt._config, "timeout_s", seconds)


def stop_in(call: str, rank: int) -> None:
    """Stop the courier of this rank right before a call of MPI that blocks, once."""
    _stop_of(rank, call).touch()


def arm() -> None:
    """Arm traps, too, in the courier of a rank."""
    traps.arm()
    rank = traps.my_rank()
    job_thread._GRACE_S = _GRACE_S
    Waits.timeout_s = _Told(_patience_of(rank))
    within = Waits.within

    @contextlib.contextmanager
    def stopping(waits: Waits, call: str) -> Iterator[None]:
        with within(waits, call):
            with contextlib.suppress(FileNotFoundError):
                _stop_of(rank, call).unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
            yield

    Waits.within = stopping


class _Told:
    """An attribute that a file tells, if it is there."""

    def __init__(self, path: Path):
        self._path = path

    def __get__(self, waits: Waits, kind: object) -> float:
        try:
            return float(self._path.read_text())
        except FileNotFoundError:
            return float(waits.__dict__["timeout_s"])

    def __set__(self, waits: Waits, seconds: float) -> None:
        waits.__dict__["timeout_s"] = seconds


def _patience_of(rank: int) -> Path:
    return OUT / f"patience-{rank}"


def _stop_of(rank: int, call: str) -> Path:
    return OUT / f"stop-{rank}-{call}"
