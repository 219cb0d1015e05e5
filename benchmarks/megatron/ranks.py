"""The program of each rank: it saves and loads tensor-aware state dicts with mlflash and NVRx, and times a memcpy."""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.aims import MEMCPY
from bench.clock import Action, Bench, Seconds
from bench.nvrx import Aware, on_cpu
from bench.rows import Samples, row
from mpi4py import MPI

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import LocalCheckpoints, allow
from mlflash.adapters.megatron.nvrx import HAVE_NVRX

COMM = MPI.COMM_WORLD
TIMEOUT_S = 120.0
OURS, THEIRS = "mlflash, copy", "NVRx, clique of 2"


class Rivals:
    """Times both managers.

    Args:
        bench: the clock.
    """

    def __init__(self, bench: Bench):
        self.bench, self.memory = bench, bench.memory
        init_process_group(comm=COMM)
        self.queue: Any = None
        if HAVE_NVRX:
            from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

            self.queue = AsyncCallsQueue(persistent=False)

    def case(self, count: int, nbytes: int) -> None:
        """Time both managers with a state of this many tensors, then time their loads after rank 0's node was lost."""
        live = [torch.full((nbytes // 4 // count,), float(COMM.rank)) for _ in range(count)]
        copies = [tensor.clone() for tensor in live]
        made: dict[str, Callable[[], Any]] = {OURS: lambda: self.ours(count)}
        if HAVE_NVRX:
            made[THEIRS] = lambda: self.theirs(count)
        lose = {OURS: self.lose_ours, THEIRS: self.lose_theirs}
        managers = {what: make() for what, make in made.items()}
        step = 0

        def change() -> None:
            nonlocal step
            step += 1
            torch._foreach_add_(live, 1.0)

        def memcpy() -> None:
            for copy, tensor in zip(copies, live, strict=True):
                copy.copy_(tensor)

        def renew() -> None:
            for what in made:
                close(managers[what])
                lose[what](count)
                managers[what] = made[what]()

        actions: dict[str, Action] = {MEMCPY: memcpy}
        after: dict[str, Action] = {MEMCPY: memcpy}
        for what in made:
            actions[what] = lambda what=what: self.save(what, managers[what], live, step)  # type: ignore[misc]
            actions[f"{what}, loaded"] = lambda what=what: self.load(what, managers[what], live, "load")  # type: ignore[misc]
            after[what] = lambda what=what: self.load(what, managers[what], live, "after loss")  # type: ignore[misc]
        case = f"{count} tensors of {nbytes // count >> 10} KiB"
        samples = self.bench.repeat(actions, before=change)
        self.bench.rows(row("memcpy", samples[MEMCPY], {MEMCPY: samples[MEMCPY]}, case=case, column="stall"))
        self.write(case, samples, ("stall", "total", "load"), list(made))
        self.write(case, self.bench.repeat(after, before=renew), ("after loss",), list(made))
        for manager in managers.values():
            close(manager)

    def save(self, what: str, manager: Any, live: list[torch.Tensor], step: int) -> Seconds:
        start = time.perf_counter()
        request = manager.save(Aware(list(live)), step, is_async=True)
        if self.queue is not None:
            self.queue.schedule_async_request(request)
        stall_s = time.perf_counter() - start
        if self.queue is not None:
            self.queue.maybe_finalize_async_calls(blocking=True)
        else:
            request.execute_sync()
        return {f"{what} stall": stall_s, f"{what} total": time.perf_counter() - start}

    def load(self, what: str, manager: Any, live: list[torch.Tensor], column: str) -> Seconds:
        COMM.Barrier()
        start = time.perf_counter()
        assert manager.find_latest() > 0
        loaded, _ = manager.load()
        seconds = time.perf_counter() - start
        assert all(map(torch.equal, loaded.tensors, live)), column
        manager.latest_iteration = -1  # the next load has to find it again
        return {f"{what} {column}": seconds}

    def ours(self, count: int) -> LocalCheckpoints:
        manager = LocalCheckpoints(f"of {count}", "", "copy", job=f"of-{count}", memory=str(self.memory), comm=COMM,
                                   timeout_s=TIMEOUT_S)  # fmt: skip
        assert manager.checkpointer.survives
        return manager

    def theirs(self, count: int) -> Any:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

        strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
        return LocalCheckpointManager(self.memory / f"nvrx-{count}", repl_strategy=strategy)

    def lose_ours(self, count: int) -> None:
        if COMM.rank == 0:
            (node,) = self.memory.glob(f"mlflash-*/of-{count}/node0")
            shutil.rmtree(node)

    def lose_theirs(self, count: int) -> None:
        if COMM.rank == 0:
            shutil.rmtree(self.memory / f"nvrx-{count}" / "0")

    def write(self, case: str, samples: Samples, columns: Sequence[str], made: Sequence[str]) -> None:
        for column in columns:
            theirs = {"NVRx": samples[f"{THEIRS} {column}"]} if THEIRS in made else {}
            for what in made:
                over = {MEMCPY: samples[MEMCPY], **(theirs if what == OURS else {})}
                self.bench.rows(row(what, samples[f"{what} {column}"], over, case=case, column=column))


def close(manager: Any) -> None:
    if isinstance(manager, LocalCheckpoints):
        manager.close()
    COMM.Barrier()


def main() -> None:
    out, memory, nbytes, repetitions, *counts = sys.argv[1:]
    bench = Bench(COMM, Path(out), Path(memory), int(repetitions), warm_up=1)
    rivals = Rivals(bench)
    allow(Aware)
    bench.header(NVRx="found" if HAVE_NVRX else "not installed")
    warnings.filterwarnings("ignore", module="nvidia_resiliency_ext")  # torch's warnings about NVRx's calls
    with on_cpu():
        for count in counts:
            rivals.case(int(count), int(nbytes))
        if rivals.queue is not None:
            rivals.queue.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
