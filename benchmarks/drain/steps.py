"""Times training steps (matrix products on one thread and an allreduce) with and without a drain."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.clock import Bench
from bench.rows import Row
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RATES = {"as fast as it goes": 0.0, "at 100 MB/s": 1e8, "at 30 MB/s": 3e7}  # bytes per second of all ranks
WINDOW_S, QUICK_WINDOW_S = 3.0, 0.5  # seconds of steps without a drain
MOST = 2000  # largest number of steps
ALONE = "a step without a drain"


class Training:
    """Makes steps that take about ``step_s`` seconds."""

    def __init__(self, step_s: float):
        self._a = torch.randn(512, 512)
        self._for(1.0)  # warm up
        self._times = max(1, self._for(step_s))

    def _for(self, seconds: float) -> int:
        done, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            torch.mm(self._a, self._a)
            done += 1
        return done

    def steps(self, seconds: float) -> list[float]:
        """Train for this number of seconds. Return the seconds of each step."""
        found = []
        end = time.perf_counter() + seconds
        while COMM.bcast(time.perf_counter() < end):
            begun = time.perf_counter()
            for _ in range(self._times):
                torch.mm(self._a, self._a)
            COMM.allreduce(1)
            found.append(time.perf_counter() - begun)
        return found

    def until(self, ended: Callable[[], bool]) -> list[float]:
        """Train until ``ended`` is true on all ranks, but stop after about `MOST` steps."""
        found: list[float] = []
        while not COMM.allreduce(int(ended()), MPI.MIN) and len(found) < MOST:
            found += self.steps(0.2)
        return found


def slowdown(bench: Bench, state: Any, disk: Path, step_s: float, quick: bool) -> None:
    """Train during a drain, and during a process that only writes as many bytes at the same rate."""
    training, window_s = Training(step_s), QUICK_WINDOW_S if quick else WINDOW_S
    nbytes = sum(tensor.to_local().nbytes for tensor in state.values())
    directory = disk / "slowdown"
    for name, rate in list(RATES.items())[: 1 if quick else None]:
        COMM.Barrier()
        before = training.steps(window_s)
        directory.mkdir(exist_ok=True)
        arguments = [str(directory / str(COMM.rank)), str(nbytes), str(rate / COMM.size)]
        writer = subprocess.Popen([sys.executable, "-c", WRITER, *arguments])
        during = training.until(lambda: writer.poll() is not None)  # noqa: B023
        bench.rows(compared(f"a process that writes zeros, {name}", before + training.steps(window_s), during))
        COMM.Barrier()
        settings: dict[str, Any] = {"directory": directory, "redundancy": "none", "drain_rate": rate}
        with bench.job("slowdown") as job:
            with bench.checkpointer(job, **settings) as ckpt:
                ckpt.save(1, state).wait()
                before = training.steps(window_s)
                drain = ckpt.drain()
                during = training.until(lambda: drain.done)  # noqa: B023
                drain.given_up.set()
            bench.rows(compared(f"a drain, {name}", before + training.steps(window_s), during))
        if COMM.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        COMM.Barrier()


def compared(what: str, before: list[float], during: list[float]) -> Row:
    """Compare the means, because a drain works in bursts. The quartiles are those of single steps."""
    alone = float(np.mean(before))
    mean, spread = (float(np.mean(during)), np.quantile(during, (0.25, 0.75))) if during else (alone, (alone, alone))
    return Row(
        case="Steps of a training: the mean, with quartiles of single steps", what=f"during {what}", seconds=mean,
        samples=during, over={ALONE: mean / alone}, spread={ALONE: [float(one) / alone for one in spread]}, aim=None,
        note=f"{mean / alone - 1:+.1%}, {len(during)} steps",
    )  # fmt: skip


# What any program must do that writes this number of bytes to the disk at this rate.
WRITER = """
import os, sys, time
path, nbytes, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
chunk, start, sent = bytes(8 << 20), time.monotonic(), 0
with open(path, "wb", buffering=0) as file:
    while sent < nbytes:
        sent += file.write(chunk[: nbytes - sent])
        while rate and (ahead := sent / rate - (time.monotonic() - start)) > 0:
            time.sleep(ahead)
    os.fsync(file.fileno())
"""
