"""The program of each of the two ranks: for each setting, it makes steps without a save and steps during a save."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench.aims import ALONE
from bench.clock import Action, Bench
from bench.rows import Samples, row
from bench.states import large_state
from bench.yardsticks import Yardsticks
from cores import OWN_CORE, Cores
from mpi4py import MPI
from steps import COMPUTES, WAITS, Step, step_of, steps_for, steps_until

from mlflash import Checkpointer

AS_FAST_AS_IT_GOES, RATE = "as fast as it goes", 1e8
SETTINGS: dict[str, dict[str, Any]] = {
    AS_FAST_AS_IT_GOES: {},
    f"send_rate= {RATE / 1e6:.0f} MB/s": {"send_rate": RATE},
}


class Measured:
    """A training whose steps are timed. A rank that does not train only waits.

    Args:
        step: makes a step of the training. It is also an attribute.
        trains: whether this rank trains.
        window_s: seconds of training without a save.
    """

    def __init__(self, step: Step, trains: bool, window_s: float):
        self.step, self._trains, self._window_s = step, trains, window_s
        self.saves = 0

    def without(self, name: str = ALONE) -> dict[str, float]:
        """Train without a save."""
        steps = steps_for(self.step, self._window_s) if self._trains else [0.0]
        return {name: float(np.mean(steps))}

    def around(self, action: Action) -> dict[str, Action]:
        """Train before, during and after an action. The yardstick is the mean of before and after."""
        return {"before": lambda: self.without("early"), "with": action, "after": lambda: self.without("late")}

    def beside(self, ckpt: Checkpointer, state: Any) -> Action:
        """Train while a save is in flight, which means from the return of `save` until the commit."""

        def action() -> dict[str, float]:
            self.saves += 1
            cpu, own = time.process_time(), time.thread_time()
            snapshot = ckpt.save(self.saves, state)
            copying = time.thread_time() - own
            steps = steps_until(self.step, lambda: snapshot.done) if self._trains else [0.0]
            snapshot.wait()
            courier = (time.process_time() - cpu) - (time.thread_time() - own)
            rate = ckpt.report()["send rate"] or 0.0
            return {
                "beside": float(np.mean(steps)), "steps": float(len(steps)), "committed": snapshot.commit_s or 0.0,
                "courier CPU": courier, "copying": copying, "rate": rate,
            }  # fmt: skip

        return action


def slowed(bench: Bench, cores: Cores, kind: str, does: str, nbytes: int, window_s: float) -> None:
    """Time one kind of step during saves with each setting."""
    measured, state = Measured(step_of(does), cores.trains, window_s), large_state(nbytes)
    rate = 0.0
    title = f"A step of a training ({does}); {kind}"
    for name, settings in SETTINGS.items():
        bench.warm_up = 1
        with bench.job("training") as job:
            with cores.of_courier():
                ckpt = bench.checkpointer(job, redundancy="copy", **settings)
            with ckpt:
                ckpt.prepare(state)
                samples = alone(bench.repeat(measured.around(measured.beside(ckpt, state))))
        over = {ALONE: samples[ALONE]}
        if not rate:
            bench.rows(row(ALONE, samples[ALONE], over, case=title))
            rate = nbytes / float(np.median(samples["committed"]))
        shows = "slowed" if kind == OWN_CORE and name == AS_FAST_AS_IT_GOES else ""
        bench.rows(row(f"save in flight, {name}", samples["beside"], over, shows, case=title,
                       note=said(samples)))  # fmt: skip


def alone(samples: Samples) -> Samples:
    return {**samples, ALONE: (samples["early"] + samples["late"]) / 2}


def said(samples: Samples) -> str:
    of = {name: float(np.median(values)) for name, values in samples.items()}
    lost_s = of["steps"] * (of["beside"] - of[ALONE])
    rate = f", at {of['rate'] / 1e6:.0f} MB/s" if of["rate"] else ""
    return (f"committed after {of['committed']:.2f} s ({of['steps']:.0f} steps){rate}; {lost_s * 1e3:.0f} ms lost per "
            f"save, {of['courier CPU'] * 1e3:.0f} ms CPU of the courier")  # fmt: skip


def beside_memcpy(bench: Bench, cores: Cores, does: str, nbytes: int, window_s: float) -> None:
    """Time steps while the other rank only copies memory. This is the effect of a busy neighbor core."""
    measured = Measured(step_of(does), cores.trains, window_s)
    beside = Yardsticks(bench.comm, bench.memory, nbytes)
    source = [np.ones(nbytes, dtype=np.uint8)]

    def copied() -> dict[str, float]:
        if cores.trains:
            return measured.without("beside")
        steps_for(lambda: beside.memcpy(source), window_s)
        return {"beside": 0.0}

    samples = alone(bench.repeat(measured.around(copied)))
    beside.free()
    bench.rows(row("no save, but a memcpy on the other core", samples["beside"], {ALONE: samples[ALONE]},
                   case=f"A step of a training ({does}); {OWN_CORE}"))  # fmt: skip


def main() -> None:
    out, memory, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    nbytes, repetitions, window_s = int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions)
    bench.header()
    cores = Cores(kind, bench.comm.rank)
    for does in (COMPUTES, WAITS):
        slowed(bench, cores, kind, does, nbytes, window_s)
        if kind == OWN_CORE:
            bench.warm_up = 1
            beside_memcpy(bench, cores, does, nbytes, window_s)


if __name__ == "__main__":
    main()
