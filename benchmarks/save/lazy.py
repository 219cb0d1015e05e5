"""The program of each rank of a training whose saves copy during the next step: save(step, state, until=optimizer).

A step is forward, backward and Adam's step of an MLP. It takes about four times as long as the copy. Training waits for
`save` itself and, in `optimizer.step()`, for the bytes that are not copied yet.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.aims import MEMCPY
from bench.clock import Action, Bench
from bench.rows import row
from bench.states import State, bytes_of
from bench.yardsticks import Yardsticks
from mpi4py import MPI
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mlflash import Checkpointer

LAYERS = 5
PER_PARAMETER = 3  # the parameter and two moments of Adam
STEP, COPIES = "a step without a save", 4.0


class Training:
    """A model that is trained. It times how long its optimizer waits before it steps."""

    def __init__(self, nbytes: int):
        width = round((nbytes / 4 / PER_PARAMETER / LAYERS) ** 0.5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6, foreach=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._batch = torch.randn(1, width)
        self._asked = self.waited_s = 0.0
        # The first hook runs before those of any Checkpointer, and the second, the optimizer's own, runs after them.
        register_optimizer_step_pre_hook(self._begin)
        self.optimizer.register_step_pre_hook(self._end)
        self.compute()
        self.optimizer.step()

    def _begin(self, *args: Any) -> None:
        self._asked = time.perf_counter()

    def _end(self, *args: Any) -> None:
        self.waited_s = time.perf_counter() - self._asked

    def lasting(self, seconds: float) -> int:
        """Choose the batch so that forward and backward take about this number of seconds. Return its size."""
        size = 1
        for _ in range(4):
            start = time.perf_counter()
            self.compute()
            took = time.perf_counter() - start
            size = min(4096, max(1, round(size * seconds / took)))
            self.resize(size)
        return size

    def resize(self, size: int) -> None:
        self._batch = torch.randn(size, self._batch.shape[1])

    def compute(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._batch).square().mean().backward()

    def tensors(self) -> State:
        """Return all tensors that a save of it contains, by name."""
        found = dict(self.model.state_dict())
        for number, of in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in of.items() if value.dim()}
        return found


def step_with(training: Training, ckpt: Checkpointer, numbers: list[int], name: str, until: Any) -> Action:
    """Return an action that saves and trains one step, and then waits for the commit."""

    def action() -> dict[str, float]:
        numbers[0] += 1
        start = time.perf_counter()
        snapshot = ckpt.save(numbers[0], training.state, until=until)
        stall_s = time.perf_counter() - start
        training.compute()
        training.optimizer.step()
        step_s = time.perf_counter() - start
        snapshot.wait()
        found = {"stall": stall_s, "wait": training.waited_s, "both": stall_s + training.waited_s, "step": step_s}
        return {f"{name} {key}": value for key, value in found.items()}

    return action


def main() -> None:
    out, memory, nbytes, repetitions = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    comm = MPI.COMM_WORLD
    bench = Bench(comm, out, memory, repetitions)
    torch.set_num_threads(1)
    training = Training(nbytes)
    pieces = bytes_of(training.tensors())
    beside = Yardsticks(comm, memory, sum(piece.nbytes for piece in pieces))
    copies_s = np.median(bench.repeat({MEMCPY: lambda: beside.memcpy(pieces)})[MEMCPY])
    training.resize(comm.allreduce(training.lasting(COPIES * float(copies_s)), MPI.MAX))

    def plain() -> None:
        training.compute()
        training.optimizer.step()

    redundancy, numbers = "none" if comm.size == 1 else "copy", [0]
    with bench.job("lazy") as job, bench.checkpointer(job, redundancy=redundancy) as ckpt:
        ckpt.prepare(training.state)
        actions: dict[str, Action] = {
            MEMCPY: lambda: beside.memcpy(pieces), STEP: plain,
            "eager": step_with(training, ckpt, numbers, "eager", None),
            "lazy": step_with(training, ckpt, numbers, "lazy", training.optimizer),
        }  # fmt: skip
        samples = bench.repeat(actions)
    over = {MEMCPY: samples[MEMCPY], STEP: samples[STEP]}
    cores = "a core idle (1 rank)" if comm.size == 1 else f"all cores busy ({comm.size} ranks)"
    bench.rows(*(row(what, samples[name], over, shows, case=f"The lazy copy; {cores}, {redundancy}")
                 for what, name, shows in (
                     (STEP, STEP, ""),
                     ("eager: stall of save", "eager stall", ""),
                     ("lazy: stall of save and wait in optimizer.step()", "lazy both", "lazy"),
                     ("lazy: the part in save", "lazy stall", ""),
                     ("lazy: the part in optimizer.step()", "lazy wait", ""),
                     ("a step with an eager save", "eager step", ""),
                     ("a step with a lazy save", "lazy step", ""),
                 )))  # fmt: skip
    beside.free()


if __name__ == "__main__":
    main()
