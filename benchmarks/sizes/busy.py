"""The program of each of two ranks: it saves at every step, while the courier still works on the previous save.

A step computes for as long as a memcpy of the state takes, and changes the whole state. A commit takes longer.
``when_busy`` decides whether training then waits for a slot or skips the save.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from bench.aims import MEMCPY
from bench.clock import Action, Bench
from bench.rows import row
from bench.states import State, bytes_of, change, large_state
from bench.yardsticks import Yardsticks
from mpi4py import MPI

from mlflash import Checkpointer

STEPS = 8
WITHOUT = "steps without saves"


class Training:
    """Makes steps that change the whole state."""

    def __init__(self, state: State, step_s: float):
        self.state = state
        self._a = torch.randn(256, 256)
        self._times = 1
        took = min(self._products() for _ in range(20))
        self._times = max(1, round(step_s / took))

    def _products(self) -> float:
        start = time.perf_counter()
        for _ in range(self._times):
            torch.mm(self._a, self._a)
        return time.perf_counter() - start

    def step(self) -> None:
        self._products()
        change(self.state)


def run(training: Training, ckpt: Checkpointer | None, first: int) -> dict[str, float]:
    """Train. Return the seconds per step, and how many saves were skipped."""
    start, snapshots = time.perf_counter(), []
    for number in range(STEPS):
        training.step()
        if ckpt is not None:
            snapshots.append(ckpt.save(first + number, training.state))
    seconds = (time.perf_counter() - start) / STEPS
    if ckpt is not None:
        ckpt.wait()
    return {"step": seconds, "skipped": float(sum(one.skipped for one in snapshots))}


def main() -> None:
    out, memory, nbytes, repetitions = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions, warm_up=1)
    torch.set_num_threads(1)
    state = large_state(nbytes)
    pieces = bytes_of(state)
    beside = Yardsticks(bench.comm, memory, nbytes)
    memcpy: dict[str, Action] = {MEMCPY: lambda: beside.memcpy(pieces)}
    training = Training(state, float(np.median(bench.repeat(memcpy)[MEMCPY])))
    with (
        bench.job("wait") as waits,
        bench.job("skip") as skips,
        bench.checkpointer(waits, redundancy="copy", when_busy="wait") as waiting,
        bench.checkpointer(skips, redundancy="copy", when_busy="skip", strict=False) as skipping,
    ):
        waiting.prepare(state)
        skipping.prepare(state)
        done = [0]

        def action(name: str, ckpt: Checkpointer | None) -> Action:
            return lambda: {f"{name} {key}": value for key, value in run(training, ckpt, done[0]).items()}

        def before() -> None:
            done[0] += STEPS

        actions = {**memcpy, "none": action("none", None), "wait": action("wait", waiting),
                   "skip": action("skip", skipping)}  # fmt: skip
        samples = bench.repeat(actions, before=before)
    over = {MEMCPY: samples[MEMCPY], WITHOUT: samples["none step"]}
    case = f"A save at every step, {nbytes >> 20} MiB, steps as long as a memcpy: seconds of a step"
    bench.rows(row(WITHOUT, samples["none step"], over, case=case))
    for name in ("wait", "skip"):
        kept = STEPS - float(np.median(samples[f"{name} skipped"]))
        note = f"{kept:g} of {STEPS} saves committed"
        bench.rows(row(f'steps with saves, when_busy="{name}"', samples[f"{name} step"], over, case=case, note=note))
    beside.free()


if __name__ == "__main__":
    main()
