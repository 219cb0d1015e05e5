"""Measures what Megatron's local checkpoints cost with LocalCheckpoints, which keeps copies on another node.

    python benchmarks/megatron/run.py [--ranks 2] [--mib 256] [--repetitions 5] [--quick] [--json FILE]

The ranks run under mpiexec, each on a node of its own. After each load they compare the loaded state bit by
bit with the saved one. benchmarks/peers measures NVRx's manager.

    stall       time until save returns and training continues
    total       time until the request is finalized
    load        time of find_latest and load
    after loss  the same after rank 0's node was lost
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from bench.aims import MEMCPY
from bench.clock import Action, Bench, Seconds
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import Samples, row
from bench.tensor_aware import TensorAware

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import LocalCheckpoints, allow

TIMEOUT_S = 120.0


class Saves:
    """Times saves and loads of a state of ``count`` tensors, which change before each repetition."""

    def __init__(self, bench: Bench, count: int, nbytes: int):
        self.bench, self.count, self.case = bench, count, f"{count} tensors of {nbytes // count >> 10} KiB"
        self.live = [torch.full((nbytes // 4 // count,), float(bench.comm.rank)) for _ in range(count)]
        self.copies = [tensor.clone() for tensor in self.live]
        self.step = 0
        self.manager = self.open()

    def open(self) -> LocalCheckpoints:
        settings: dict[str, Any] = {
            "job": f"of-{self.count}",
            "comm": self.bench.comm,
        }
        manager = LocalCheckpoints(f"of {self.count}", "", "copy", timeout_s=TIMEOUT_S, **settings)
        assert manager.checkpointer.survives
        return manager

    def close(self) -> None:
        self.manager.close()
        self.bench.comm.Barrier()

    def measure(self) -> None:
        """Time saves and loads, and then loads after the node of rank 0 was lost."""
        memcpy: dict[str, Action] = {MEMCPY: self.memcpy}
        samples = self.bench.repeat({**memcpy, "save": self.save, "load": lambda: self.load("load")}, self.change)
        self.write(samples, "stall", "total", "load")
        samples = self.bench.repeat({**memcpy, "load": lambda: self.load("after loss")}, self.lose_node)
        self.write(samples, "after loss")
        self.close()

    def memcpy(self) -> None:
        for copy, tensor in zip(self.copies, self.live, strict=True):
            copy.copy_(tensor)

    def change(self) -> None:
        self.step += 1
        torch._foreach_add_(self.live, 1.0)

    def save(self) -> Seconds:
        start = time.perf_counter()
        request = self.manager.save(TensorAware(list(self.live)), self.step, is_async=True)
        stall_s = time.perf_counter() - start
        request.execute_sync()
        return {"stall": stall_s, "total": time.perf_counter() - start}

    def load(self, column: str) -> Seconds:
        self.bench.comm.Barrier()
        start = time.perf_counter()
        assert self.manager.find_latest() > 0
        loaded, _ = self.manager.load()
        seconds = time.perf_counter() - start
        assert all(map(torch.equal, loaded.tensors, self.live)), column
        self.manager.latest_iteration = -1  # the next load has to find it again
        return {column: seconds}

    def lose_node(self) -> None:
        self.close()
        if self.bench.comm.rank == 0:
            shutil.rmtree(self.bench.directory_of(f"of-{self.count}"))
        self.manager = self.open()

    def write(self, samples: Samples, *columns: str) -> None:
        for column in columns:
            self.bench.rows(row("mlflash, copy", samples[column], {MEMCPY: samples[MEMCPY]}, case=self.case,
                                column=column))  # fmt: skip


def saves(bench: Bench, nbytes: int, counts: list[int]) -> None:
    """Time saves of states of these numbers of tensors."""
    bench.warm_up = 1
    init_process_group(comm=bench.comm)
    allow(TensorAware)
    for count in counts:
        Saves(bench, count, nbytes).measure()
    dist.destroy_process_group()


def main() -> int:
    parser = parser_of(__doc__, repetitions=5)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks, an even number")
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensors on each rank")
    parser.add_argument("--tensors", type=int, nargs="+", default=[64, 1024], help="numbers of tensors")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.tensors, args.repetitions = 8, [16], 1
    arguments = {"nbytes": args.mib << 20, "counts": args.tensors}
    return Question(args).run([Part(args.ranks, saves, arguments)])


if __name__ == "__main__":
    sys.exit(main())
