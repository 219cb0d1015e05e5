"""Measures how much the courier slows a training step.

    python benchmarks/training/run.py [--mib 64] [--repetitions 5] [--quick] [--json FILE]

Two ranks run on this machine under mpiexec, each on a node of its own. Either training and courier of a rank
share one core, or only rank 0 trains, on one core, and the couriers of both ranks are on another.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.aims import ALONE
from bench.clock import Bench
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import row
from bench.states import large_state

from mlflash import Checkpointer

ONE_CORE, OWN_CORE = "each rank has one core for both", "the couriers have a core of their own"
COMPUTES, WAITS, PYTHON = "matrix products", "waits for a device", "a Python loop"
STEP_S, LAUNCHES_S = 0.01, 0.002  # seconds of a step, and of the calls in a step that waits
WIDTH, TOKENS, HEADS = 256, 64, 4
RATE = 1e8
FAST = "as fast as it can"
SETTINGS: dict[str, dict[str, Any]] = {FAST: {}, f"send_rate={RATE:g}": {"send_rate": RATE}}

Step = Callable[[], object]


def slowdown(bench: Bench, nbytes: int, kind: str, window_s: float) -> None:
    """Time steps of three kinds before, during and after saves, with each setting."""
    bench.warm_up = 1
    torch.set_num_threads(1)
    cores, state = Cores(kind, bench.comm.rank), large_state(nbytes)
    for does, step in {COMPUTES: computing(), WAITS: waiting(), PYTHON: looping()}.items():
        for title, settings in SETTINGS.items():
            with bench.job("training") as job:
                with cores.of_courier():  # the first one starts the courier, and the others share it
                    ckpt = bench.checkpointer(job, **settings)
                with ckpt:
                    ckpt.prepare(state)
                    samples = bench.repeat({
                        "before": lambda: {"early": mean_step(step, cores.trains, window_s)},  # noqa: B023
                        "during": during_save(ckpt, state, step if cores.trains else None),
                        "after": lambda: {"late": mean_step(step, cores.trains, window_s)},  # noqa: B023
                    })  # fmt: skip
            alone = (samples["early"] + samples["late"]) / 2
            note = f"committed after {np.median(samples['committed']):.2f} s" if does == PYTHON else ""
            is_aimed = kind == OWN_CORE and title == FAST and does != PYTHON
            case = f"A step during a save of {nbytes >> 20} MiB; {kind}"
            bench.rows(row(does, samples["step"], {ALONE: alone}, "slowed" if is_aimed else "", case=case,
                           column=title, note=note))  # fmt: skip


class Cores:
    """The cores of a rank.

    Args:
        kind: `ONE_CORE` or `OWN_CORE`.
        rank: 0 or 1.

    Attributes:
        trains: whether this rank trains.
    """

    def __init__(self, kind: str, rank: int):
        allowed = sorted(os.sched_getaffinity(0))
        self.trains = kind == ONE_CORE or rank == 0
        # With two cores: {0: training, 1: couriers}. With more cores, each courier has its own.
        self._main = allowed[0] if rank == 0 else allowed[-1]
        self._courier = allowed[1] if kind == OWN_CORE and rank == 0 else self._main
        os.sched_setaffinity(0, {self._main})

    @contextlib.contextmanager
    def of_courier(self) -> Iterator[None]:
        """Bind the threads and processes that the block starts to the courier's core."""
        os.sched_setaffinity(0, {self._courier})
        try:
            yield
        finally:
            os.sched_setaffinity(0, {self._main})


def during_save(ckpt: Checkpointer, state: Any, step: Step | None) -> Callable[[], dict[str, float]]:
    """Return an action that trains while a save is in flight, from the return of `save` until the commit."""

    def action() -> dict[str, float]:
        snapshot = ckpt.save((ckpt.last_step or 0) + 1, state)
        steps = steps_until(step, lambda: snapshot.done) if step is not None else [0.0]
        snapshot.wait()
        return {"step": float(np.mean(steps)), "committed": snapshot.commit_s or 0.0}

    return action


def mean_step(step: Step, trains: bool, seconds: float) -> float:
    """Train for this number of seconds. Return the mean seconds of a step."""
    end = time.perf_counter() + seconds
    return float(np.mean(steps_until(step, lambda: time.perf_counter() >= end))) if trains else 0.0


def steps_until(step: Step, is_done: Callable[[], bool]) -> list[float]:
    """Make steps until ``is_done``. Return the seconds of the steps before that, at least of one."""
    steps: list[float] = []
    while True:
        start = time.perf_counter()
        step()
        step_s = time.perf_counter() - start
        done = is_done()
        if not done or not steps:
            steps.append(step_s)
        if done:
            return steps


def computing() -> Step:
    """Return forward, backward and step of a GPT block that fits into the caches of a core."""
    block = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-6)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS)
    batch = torch.randn(1, TOKENS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        block(batch, src_mask=mask, is_causal=True).square().mean().backward()
        optimizer.step()

    batch = torch.randn(times_in(step, STEP_S), TOKENS, WIDTH)
    return step


def waiting() -> Step:
    """Return steps like those of a rank with a GPU: many small calls, like kernel launches, and a wait without the GIL.

    The wait begins after all calls, as if the device began only then. If the queue of a real device never runs empty,
    slower launches cost less.
    """
    small = torch.zeros(16)
    times = times_in(lambda: small.add_(1.0), LAUNCHES_S)

    def step() -> None:
        for _ in range(times):
            small.add_(1.0)
        time.sleep(STEP_S - LAUNCHES_S)

    return step


def looping() -> Step:
    """Return a loop that never releases the interpreter by itself."""

    def loop(times: int = 1000) -> None:
        for _ in range(times):
            pass

    times = 1000 * times_in(loop, STEP_S)
    return lambda: loop(times)


def times_in(work: Step, seconds: float) -> int:
    """Return how often ``work`` can run in this number of seconds."""
    for _ in range(3):
        work()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < 20 * seconds:
        work()
        done += 1
    return max(1, done // 20)


def main() -> int:
    parser = parser_of(__doc__, repetitions=5)
    parser.add_argument("--mib", type=int, default=64, help="MiB of tensors per rank, a multiple of 8")
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this needs two cores: one for training and one for the courier, and one for each of two ranks")
    if args.quick:
        args.mib, args.repetitions = 16, 1
    sizes = {"nbytes": args.mib << 20, "window_s": 0.1 if args.quick else 0.3}
    return Question(args).run([Part(2, slowdown, {**sizes, "kind": kind}) for kind in (ONE_CORE, OWN_CORE)])


if __name__ == "__main__":
    sys.exit(main())
