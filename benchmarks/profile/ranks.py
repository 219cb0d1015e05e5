"""The program of each of the two ranks: it repeats one action while a profiler samples rank 0 from outside."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench.clock import Bench
from bench.rows import Row
from bench.states import Saver, State, change
from mpi4py import MPI
from stacks import Stacks, by_thread

RATE = 1000  # looks per second
LEAST = 0.03  # part of a thread's seconds: functions with less are left out
DEADLINE_S = 20.0
Work = Callable[[], None]


@contextlib.contextmanager
def watched(bench: Bench, into: Path) -> Iterator[None]:
    """Let py-spy sample rank 0 while the block runs. Collective."""
    spy = None
    if bench.comm.rank == 0:
        program = [Path(sys.executable).with_name("py-spy"), "record", "--pid", str(os.getpid()), "--rate", str(RATE),
                   "--format", "raw", "--function", "--nonblocking", "--output", into]  # fmt: skip
        spy = subprocess.Popen([*map(str, program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(2.0)  # until it samples
    bench.comm.Barrier()
    yield
    bench.comm.Barrier()
    if spy is not None:
        spy.send_signal(signal.SIGINT)
        said, _ = spy.communicate(timeout=DEADLINE_S)
        if spy.returncode:
            raise RuntimeError(f"py-spy ended with {spy.returncode}: {said}")


def rows_of(case: str, threads: dict[str, list[str]], seconds: float, times: int) -> Iterator[Row]:
    """Make a table of each thread.

    Args:
        case: what was done.
        threads: the stacks of each thread, by name.
        seconds: the time of all repetitions together.
        times: the number of repetitions.
    """
    for name, lines in threads.items():
        tree = Stacks.from_lines(lines)
        unit = 1 / RATE / times
        busy = f"{case}, {seconds / times * 1e3:.0f} ms: the {name} thread, busy for {tree.seen * unit * 1e3:.0f} ms"
        for depth, one in tree.walk(LEAST * tree.seen):
            yield Row(
                what="· " * depth + one.name, seconds=one.seen * unit, over={"all of the thread": one.seen / tree.seen},
                aim=None, case=busy, note=f"itself {one.itself * unit * 1e3:.1f} ms" if one.itself else "",
            )  # fmt: skip


def profile(bench: Bench, case: str, work: Work) -> dict[str, list[str]]:
    """Repeat an action, and write how many seconds each function took. Collective."""
    for _ in range(bench.warm_up):
        work()
    raw = bench.memory / "raw"
    with watched(bench, raw):
        start = time.perf_counter()
        for _ in range(bench.repetitions):
            work()
        seconds = time.perf_counter() - start
    if bench.comm.rank != 0:
        return {}
    threads = by_thread(raw.read_text())
    bench.rows(*rows_of(case, threads, seconds, bench.repetitions))
    return {f"{case}: {name}": lines for name, lines in threads.items()}


def saves(bench: Bench, state: State, case: str) -> dict[str, list[str]]:
    with bench.job("profile") as job, bench.checkpointer(job, redundancy="copy") as ckpt:
        saver = Saver(ckpt, state)

        def work() -> None:
            change(state)
            saver()

        ckpt.prepare(state)
        return profile(bench, f"A save of {case}", work)


def restores(bench: Bench, state: State, case: str) -> dict[str, list[str]]:
    with bench.job("profile") as job:
        with bench.checkpointer(job, redundancy="copy") as ckpt:
            Saver(ckpt, state)()

        def work() -> None:
            with bench.checkpointer(job, redundancy="copy") as ckpt:
                assert ckpt.restore(state) == 1

        return profile(bench, f"A restore of {case}, from Checkpointer to close", work)


def main() -> None:
    out, memory, nbytes, tensors, repetitions, found = sys.argv[1:]
    comm = MPI.COMM_WORLD
    bench = Bench(comm, Path(out), Path(memory), int(repetitions))
    warnings.filterwarnings("ignore", "step 1 was restored")
    logging.getLogger("mlflash").setLevel(logging.ERROR)  # it logs how often a step was restored
    each = int(nbytes) // int(tensors) // 4
    state = {f"layer{i}": torch.full((each,), float(i)) for i in range(int(tensors))}
    case = f"{int(nbytes) >> 20} MiB in {tensors} tensors"
    bench.header(rate=f"{RATE} looks per second")
    stacks = saves(bench, state, case) | restores(bench, state, case)
    if comm.rank == 0:
        Path(found).write_text(json.dumps(stacks))


if __name__ == "__main__":
    main()
