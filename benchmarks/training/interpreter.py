"""Measures the courier during a main thread that never releases the interpreter, for several switch intervals.

A thread that waits for the interpreter's lock asks for it after the switch interval, 5 ms by default. The courier needs
the lock after each chunk. So during a loop of pure Python each of its transfers begins 5 ms late.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from bench.aims import ALONE
from bench.clock import Action, Bench
from bench.rows import row
from bench.states import large_state
from cores import OWN_CORE, Cores
from mpi4py import MPI
from ranks import Measured
from steps import PYTHON, step_of

IDLE = "committed, main thread idle"
INTERVALS_S = (5e-3, 5e-4, 5e-5)  # the first is Python's default


def main() -> None:
    out, memory, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    nbytes, repetitions = int(sys.argv[4]), int(sys.argv[5])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions, warm_up=1)
    cores = Cores(kind, bench.comm.rank)
    measured, state = Measured(step_of(PYTHON), cores.trains, window_s=0.3), large_state(nbytes)
    with bench.job("python") as job:
        with cores.of_courier():
            ckpt = bench.checkpointer(job, redundancy="copy")
        with ckpt:
            ckpt.prepare(state)
            beside = measured.beside(ckpt, state)

            def at(interval_s: float) -> Action:
                def action() -> dict[str, float]:
                    sys.setswitchinterval(interval_s)
                    found = {**(beside() or {}), **measured.without()}
                    return {f"{interval_s} {name}": value for name, value in found.items()}

                return action

            def waited() -> dict[str, float]:
                measured.saves += 1
                return {IDLE: ckpt.save(measured.saves, state).wait().commit_s or 0.0}

            samples = bench.repeat({"idle": waited, **{str(each): at(each) for each in INTERVALS_S}})
    loops = "rank 0 is in a Python loop" if kind == OWN_CORE else "both ranks are in a Python loop"
    title = f"Until {nbytes >> 20} MiB are committed while {loops}; {kind}"
    bench.rows(row(IDLE, samples[IDLE], {IDLE: samples[IDLE]}, case=title))
    for each in INTERVALS_S:
        step = float(np.median(samples[f"{each} beside"] / samples[f"{each} {ALONE}"]))
        bench.rows(row(f"during a Python loop, switch interval {each * 1e3:g} ms", samples[f"{each} committed"],
                       {IDLE: samples[IDLE]}, case=title,
                       note=f"a step takes {step:.2f} times as long"))  # fmt: skip


if __name__ == "__main__":
    main()
