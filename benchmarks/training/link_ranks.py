"""The program of the ranks at both ends of a slow cable: it trains with an allreduce in every step, and saves."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench.aims import ALONE
from bench.clock import Bench, slowest
from bench.rows import row
from bench.states import State
from mpi4py import MPI

from mlflash.adapters.distributed import init_process_group

COMM = MPI.COMM_WORLD
COMPUTES_S = 0.02  # seconds of a step on a device, so that only the cable is shared
GRADIENT_NBYTES = 128 << 10
STATE_NBYTES = 4 << 20
LARGE, SMALL = 1 << 20, 1 << 17  # transfers: 42 ms and 5 ms on a cable of 200 Mbit/s
EVERY = 320  # steps: so many that a 50th of the cable is enough for a save
LAST = 3  # the last saves count: the rate is found before them
# max_slowdown= (0: not set), chunk_nbytes=, saves
SETTINGS = ((0.0, LARGE, 2), (0.0, SMALL, 2), (0.1, LARGE, 10), (0.1, SMALL, 6), (0.03, SMALL, 7))


class Training:
    """Steps of a training whose gradients go over the cable."""

    def __init__(self) -> None:
        self._gradient = torch.ones(GRADIENT_NBYTES // 4)
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def step(self) -> float:
        """Make one step. Return its seconds."""
        start = time.perf_counter()
        time.sleep(COMPUTES_S)
        dist.all_reduce(self._gradient)
        self._gradient /= COMM.size
        self._optimizer.step()
        return time.perf_counter() - start


def saved(training: Training, ckpt: Any, state: State, number: int, every: int) -> dict[str, float]:
    """Save, and train for ``every`` steps. Return the mean step during the save and the median of the others."""
    snapshot = ckpt.save(number, state)
    beside: list[float] = []
    without: list[float] = []
    for _ in range(every):
        step_s = training.step()
        (without if snapshot.done else beside).append(step_s)
    snapshot.wait()
    report = ckpt.report()
    return slowest(COMM, {
        "beside": float(np.mean(beside or without)), ALONE: float(np.median(without or beside)),
        "committed": snapshot.commit_s or 0.0, "rate": report["send rate"] or 0.0,
        "slowdown": report["slowdown"] or 0.0, "steps": len(beside),
    })  # fmt: skip


def trained(bench: Bench, training: Training, aim: float, chunk: int, every: int, saves: int) -> None:
    """Train with one setting, and write how much steps are slowed after the rate has been found."""
    state = {f"layer{i}": torch.full((1 << 18,), float(i)) for i in range(STATE_NBYTES >> 20)}
    settings = {"redundancy": "copy", "max_slowdown": aim, "chunk_nbytes": chunk, "block_nbytes": SMALL}
    with bench.job(f"link{aim}") as job, bench.checkpointer(job, **settings) as ckpt:
        ckpt.prepare(state)
        for _ in range(10):
            training.step()
        found = [saved(training, ckpt, state, number, every) for number in range(1, saves + 1)]
    samples = {name: np.array([one[name] for one in found]) for name in found[0]}
    late = {name: values[-LAST:] for name, values in samples.items()}
    rates = ", ".join(f"{rate / 1e6:.1f}" if rate else "all" for rate in samples["rate"])
    steps = ", ".join(f"{value:.2f}" for value in samples["beside"] / samples[ALONE])
    of = {name: float(np.median(values)) for name, values in late.items()}
    note = f"committed after {of['committed']:.2f} s ({of['steps']:.0f} steps)"
    if aim:
        note += f"; report: slowdown {of['slowdown']:.3f}, send rate MB/s after each save: {rates}"
    note += f"; steps: {steps}"
    what = f"{f'max_slowdown={aim}' if aim else 'as fast as it goes'}, transfers of {chunk >> 10} KiB"
    case = "A step while a save is in flight, on a slow cable"
    bench.rows(row(what, late["beside"], {ALONE: late[ALONE]}, case=case, note=note))


def main() -> None:
    out, memory, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    init_process_group(comm=COMM, host=COMM.bcast(socket.gethostname()))
    bench = Bench(COMM, out, memory, repetitions=1)
    bench.header(**{"gradient, KiB": GRADIENT_NBYTES >> 10, "state, MiB": STATE_NBYTES >> 20,
                    "steps between saves": EVERY})  # fmt: skip
    training = Training()
    for _ in range(5):
        training.step()
    for aim, chunk, saves in SETTINGS:
        if how == "whole":
            trained(bench, training, aim, chunk, EVERY, saves)
        elif chunk == SMALL:
            trained(bench, training, aim, chunk, EVERY // 8, saves=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
