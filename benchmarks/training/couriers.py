"""The program of each of the two ranks with --couriers: it times steps during saves by a thread and by a process.

A repetition has four parts in random order: no save, a save whose courier is a thread, a save whose courier is a
process, and a C program that moves the same bytes on the couriers' core. Rank 0 trains on its own core.
"""

from __future__ import annotations

import contextlib
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench.aims import ALONE
from bench.clock import Bench, slowest
from bench.meeting import meeting_anew
from bench.rows import row
from bench.states import large_state
from cores import OWN_CORE, Cores
from mpi4py import MPI
from ranks import Measured
from steps import COMPUTES, PYTHON, WAITS, step_of, steps_until

from mlflash import Checkpointer

IDLE, THREAD, PROCESS, CONTROL = "no save", "courier: a thread", "courier: a process", "no save, a C program of control"
WAITED = "committed, main thread idle"
WARM_UP = 1
Action = Callable[[], dict[str, float]]


class Control:
    """The C program, which runs on the couriers' core. Rank 0 starts it."""

    def __init__(self, folder: str, nbytes: int, core: int):
        program = Path(folder, "control")
        source = Path(__file__).with_name("control.c")
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-o", program, source], check=True, timeout=60)
        command = ["taskset", "-c", str(core), program, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def move(self) -> Callable[[], bool]:
        """Let it move the bytes once. Return a function that says whether it has done so."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output = self._process.stdout
        self._process.stdin.write(b".")

        def is_done() -> bool:
            return bool(select.select([output], [], [], 0)[0]) and bool(output.read(1))

        return is_done

    def close(self) -> None:
        self._process.communicate(timeout=60)


def actions_of(measured: Measured, ckpts: dict[str, Checkpointer], state: object, control: Control | None
               ) -> dict[str, Action]:  # fmt: skip
    """Return the actions to time: steps during something, and saves during which the main thread waits."""

    def beside_control() -> dict[str, float]:
        if control is None:
            return {"beside": 0.0}
        return {"beside": float(np.mean(steps_until(measured.step, control.move())))}

    def beside(ckpt: Checkpointer) -> Action:
        timed = measured.beside(ckpt, state)

        def action() -> dict[str, float]:
            found = dict(timed() or {})
            measured.saves += 1
            return found | {"waited": ckpt.save(measured.saves, state).wait().commit_s or 0.0}

        return action

    found: dict[str, Action] = {name: beside(ckpt) for name, ckpt in ckpts.items()}
    return found | {IDLE: lambda: measured.without("beside"), CONTROL: beside_control}


def rounds(bench: Bench, measured: Measured, actions: dict[str, Action]) -> dict[str, dict[str, np.ndarray]]:
    """Time all actions in a new order each time, each one between two spans of steps without it. Collective."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in actions}
    for number in range(WARM_UP + bench.repetitions):
        order = sorted(actions)
        random.Random(number).shuffle(order)  # the same on all ranks
        for name in order:
            bench.comm.Barrier()
            early = measured.without("early")
            bench.comm.Barrier()
            taken = actions[name]()
            bench.comm.Barrier()
            seconds = slowest(bench.comm, {**taken, **early, **measured.without("late")})
            seconds[ALONE] = (seconds["early"] + seconds["late"]) / 2
            for what, value in seconds.items():
                found[name].setdefault(what, []).extend([value] * (number >= WARM_UP))
    return {name: {what: np.array(values) for what, values in of.items()} for name, of in found.items()}


def tell(bench: Bench, does: str, nbytes: int, found: dict[str, dict[str, np.ndarray]]) -> None:
    """Write the tables."""
    slowed = {name: of["beside"] / of[ALONE] for name, of in found.items()}
    title = f"A step ({does}) during a save of {nbytes >> 20} MiB, couriers on a core of their own"
    for name in (IDLE, CONTROL, THREAD, PROCESS):
        beside = found[name]["beside"]
        over = {ALONE: found[name][ALONE], CONTROL: beside / (slowed[name] / slowed[CONTROL])}
        bench.rows(row(name, beside, over, case=title))
    title = f"Until {nbytes >> 20} MiB are committed, during steps ({does})"
    for name in (THREAD, PROCESS):
        bench.rows(row(name, found[name]["committed"], {WAITED: found[name]["waited"]}, case=title))


def main() -> None:
    out, memory, nbytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    repetitions, window_s = int(sys.argv[4]), float(sys.argv[5])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions)
    bench.header()
    cores, state = Cores(OWN_CORE, bench.comm.rank), large_state(nbytes)
    core = bench.comm.bcast(cores.courier, 0)
    control: Control | None = None
    with tempfile.TemporaryDirectory(dir=memory) as folder, contextlib.ExitStack() as closing:
        if cores.trains:
            control = Control(folder, nbytes, core)
            closing.callback(control.close)
        job = closing.enter_context(bench.job("couriers-thread"))
        with cores.of_courier():
            ckpts = {THREAD: bench.checkpointer(job, redundancy="copy", courier="thread")}
        closing.enter_context(ckpts[THREAD])
        job = closing.enter_context(bench.job("couriers-process"))
        with meeting_anew(bench.comm):
            ckpts[PROCESS] = Checkpointer(
                memory=str(memory), job=job, strict=True, timeout_s=60, redundancy="copy",
                courier="process",
            )  # fmt: skip
        closing.enter_context(ckpts[PROCESS])
        for ckpt in ckpts.values():
            ckpt.prepare(state)
        for does in (COMPUTES, WAITS, PYTHON):
            measured = Measured(step_of(does), cores.trains, window_s)
            measured.saves = max(ckpt.last_step or 0 for ckpt in ckpts.values())
            tell(bench, does, nbytes, rounds(bench, measured, actions_of(measured, ckpts, state, control)))


if __name__ == "__main__":
    main()
