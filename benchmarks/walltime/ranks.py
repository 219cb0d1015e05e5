"""The program of the rank: it trains for some steps, and saves in each of the compared ways in turn."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.aims import OFF
from bench.clock import Bench
from bench.meeting import meeting_anew
from bench.rows import row
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.adapters.distributed import init_process_group
from mlflash.demo.train import GPT

HEADS, DEPTH, LENGTH, BATCH = 4, 5, 64, 4
PER_PARAMETER = 12  # bytes: the parameter, and two moments of Adam
EAGER, LAZY, ASYNC, SYNC = "mlflash", "mlflash, until=", "dcp.async_save", "torch.save"
WARM_UP = 1
TIMEOUT_S = 60.0

Save = Callable[[int], object]


class Training:
    """A GPT with AdamW whose state has about this many bytes, including the moments."""

    def __init__(self, nbytes: int):
        torch.manual_seed(0)
        width = round((nbytes / PER_PARAMETER / (12 * DEPTH)) ** 0.5 / HEADS) * HEADS
        self.model = GPT(LENGTH, width, DEPTH, HEADS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(0, 256, (BATCH, LENGTH + 1))
        self.step = 0
        self.train_step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, Any]:
        """The same state as tensors in dicts, the form that DCP and torch.save take."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train_step(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        self.model(self.batch[:, :-1], self.batch[:, 1:]).backward()
        self.optimizer.step()

    def seconds(self, steps: int, every: int, save: Save) -> float:
        """Train for some steps, and save each time that `every` steps are done. Gives the seconds of all of it."""
        start = time.perf_counter()
        for number in range(1, steps + 1):
            self.train_step()
            if number % every == 0:
                save(self.step)
        return time.perf_counter() - start


class AsyncSaves:
    """PyTorch's asynchronous saves. Each one first waits for the save before it, as PyTorch's documentation recommends.

    It then deletes the checkpoint before that one, so two of them exist at most.
    """

    def __init__(self, training: Training, folder: Path):
        self._training, self._folder, self._future, self._saves = training, folder, None, 0

    def save(self, step: int) -> None:
        self.wait()
        self._saves += 1
        folder = self._folder / f"dcp-{self._saves % 2}"
        shutil.rmtree(folder, ignore_errors=True)
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        self._future = dcp.async_save(self._training.tensors(), storage_writer=writer)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result(TIMEOUT_S)


@contextlib.contextmanager
def ways_of(training: Training, bench: Bench, folder: Path) -> Iterator[dict[str, tuple[Save, Callable[[], None]]]]:
    """Yield all ways to save. Each is a function to call after a step, and one that waits for the end of all saves."""
    ours = {"memory": str(bench.memory), "redundancy": "none", "timeout_s": TIMEOUT_S, "strict": True}
    pytorch = AsyncSaves(training, folder)
    with contextlib.ExitStack() as stack:
        eager, lazy = (stack.enter_context(Checkpointer(job=f"walltime-{name}", **ours)) for name in ("eager", "lazy"))
        for one in (eager, lazy):
            one.prepare(training.state)
        yield {
            OFF: (lambda step: None, lambda: None),
            EAGER: (lambda step: eager.save(step, training.state), eager.wait),
            LAZY: (lambda step: lazy.save(step, training.state, until=training.optimizer), lazy.wait),
            ASYNC: (pytorch.save, pytorch.wait),
            SYNC: (lambda step: torch.save(training.tensors(), folder / f"{step % 2}.pt"), lambda: None),
        }


def main() -> None:
    out, memory, mib = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    repetitions, steps, intervals = int(sys.argv[4]), int(sys.argv[5]), [*map(int, sys.argv[6].split(","))]
    torch.set_num_threads(1)
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions)
    bench.header()
    training, folder = Training(mib << 20), memory / f"walltime-{os.getpid()}"
    folder.mkdir()
    found: dict[tuple[str, int], list[float]] = {}
    try:
        with meeting_anew(MPI.COMM_WORLD):
            init_process_group()
            with ways_of(training, bench, folder) as ways:
                cases = [(OFF, steps), *((way, every) for way in ways if way != OFF for every in intervals)]
                for number in range(WARM_UP + repetitions):
                    random.Random(number).shuffle(cases)
                    for way, every in cases:
                        save, wait = ways[way]
                        seconds = training.seconds(steps, every, save)
                        wait()  # not timed: in a longer training, this work happens during the steps that follow
                        found.setdefault((way, every), []).extend([seconds] * (number >= WARM_UP))
            dist.destroy_process_group()
    finally:
        shutil.rmtree(folder)
    off = np.array(found[OFF, steps])
    for way, every in [(OFF, steps), *((way, every) for every in intervals for way in (EAGER, LAZY, ASYNC, SYNC))]:
        what = (
            OFF if way == OFF else f"{way}, a save every {every} steps" if every > 1 else f"{way}, a save at each step"
        )
        is_aim = way == LAZY and every == 10
        bench.rows(row(what, np.array(found[way, every]), {OFF: off}, shows="wall time" if is_aim else "",
                       case=f"{steps} steps of a GPT with {mib} MiB of state"))  # fmt: skip


if __name__ == "__main__":
    main()
