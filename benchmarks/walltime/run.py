"""Measures what saves cost in wall time: how long steps with a save every N steps take, compared with no saves.

    python benchmarks/walltime/run.py [--mib 12 100] [--every 10 2 1] [--steps 10] [--repetitions 3] [--quick] ...

One rank trains the demo's GPT on one core of this machine. It saves with mlflash, at once and with until=, each step
with light=9, with `dcp.async_save` and with `torch.save`, all to /dev/shm. Another core is idle except for the work of
saves.
"""

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

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.aims import OFF
from bench.clock import Bench
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import row

from mlflash import Checkpointer
from mlflash.adapters.distributed import init_process_group
from mlflash.tools.demo_train import GPT

HEADS, DEPTH, LENGTH, BATCH = 4, 5, 64, 4
PER_PARAMETER = 12  # bytes: the parameter, and two moments of Adam
EAGER, LAZY, ASYNC, SYNC = "mlflash", "mlflash, until=", "dcp.async_save", "torch.save"
LIGHT = "mlflash, light=9, until="
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
def ways_of(
    training: Training, lightly: Training, folder: Path
) -> Iterator[dict[str, tuple[Training, Save, Callable[[], None]]]]:
    """Yield all ways to save: what trains, a function to call after a step, and one that waits for the end of saves.

    Light saves have an optimizer of their own, as they hear each of its steps.
    """
    settings: dict[str, Any] = {
        "redundancy": "none",
        "timeout_s": TIMEOUT_S,
        "strict": True,
    }
    pytorch = AsyncSaves(training, folder)
    with contextlib.ExitStack() as stack:
        eager = stack.enter_context(Checkpointer(job="walltime-eager", **settings))
        lazy = stack.enter_context(Checkpointer(job="walltime-lazy", **settings))
        eager.prepare(training.state)
        lazy.prepare(training.state)
        light = stack.enter_context(Checkpointer(job="walltime-light", light=9, **settings))
        yield {
            OFF: (training, lambda step: None, lambda: None),
            EAGER: (training, lambda step: eager.save(step, training.state), eager.wait),
            LAZY: (training, lambda step: lazy.save(step, training.state, until=training.optimizer), lazy.wait),
            LIGHT: (lightly, lambda step: light.save(step, lightly.state, until=lightly.optimizer), light.wait),
            ASYNC: (training, pytorch.save, pytorch.wait),
            SYNC: (training, lambda step: torch.save(training.tensors(), folder / f"{step % 2}.pt"), lambda: None),
        }


def trainings(bench: Bench, mib: int, steps: int, intervals: list[int]) -> None:
    """Time a training with each way to save and each interval, in a new order in each repetition."""
    torch.set_num_threads(1)
    training, lightly, folder = Training(mib << 20), Training(mib << 20), bench.memory / f"walltime-{os.getpid()}"
    folder.mkdir()
    seconds: dict[tuple[str, int], list[float]] = {}
    init_process_group(comm=bench.comm)
    with ways_of(training, lightly, folder) as ways:
        cases = [(way, every) for way in ways for every in {OFF: [steps], LIGHT: [1]}.get(way, intervals)]
        for number in range(WARM_UP + bench.repetitions):
            for way, every in random.Random(number).sample(cases, len(cases)):
                trains, save, wait = ways[way]
                taken = trains.seconds(steps, every, save)
                wait()  # not timed: in a longer training, this work happens during the steps that follow
                seconds.setdefault((way, every), []).extend([taken] * (number >= WARM_UP))
    dist.destroy_process_group()
    off = np.array(seconds[OFF, steps])
    case = f"A GPT with {mib} MiB of state, {steps} steps in {np.median(off):.2f} s, a save every N steps"
    for way, every in cases[1:]:
        shows = {EAGER: "wall time", LAZY: "wall time, until", LIGHT: "each step"}.get(way, "") if every == 1 else ""
        bench.rows(row(way, np.array(seconds[way, every]), {OFF: off}, shows, case=case, column=str(every)))


def main() -> int:
    parser = parser_of(__doc__, repetitions=3, timeout_s=280)
    parser.add_argument("--mib", type=int, nargs="+", default=[12, 100], help="MiB of state, one model for each number")
    parser.add_argument(
        "--every", type=int, nargs="+", default=[10, 2, 1], help="save every so many steps, one case for each number"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="number of steps in one timing, a multiple of each --every"
    )
    args = parser.parse_args()
    if args.quick:
        args.mib, args.every, args.steps, args.repetitions = [2], [2], 4, 2
    if any(args.steps % every for every in args.every):
        parser.error("--steps must be a multiple of each --every")
    settings = {"steps": args.steps, "intervals": args.every}
    return Question(args).run([Part(1, trainings, {"mib": mib, **settings}) for mib in args.mib])


if __name__ == "__main__":
    sys.exit(main())
