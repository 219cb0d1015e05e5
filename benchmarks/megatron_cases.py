"""What each rank of megatron.py does: save and load tensor-aware state dicts, by mlflash and by NVRx, beside a memcpy.

A round runs everything one after the other, all ranks at once; the slowest rank counts. Ratios are made within a round
and their median is taken, so that a load that comes and goes hits both sides alike.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.megatron import LocalCheckpoints, allow
from mlflash.adapters.megatron.nvrx import HAVE_NVRX
from mpi4py import MPI
from torch.overrides import TorchFunctionMode

COMM = MPI.COMM_WORLD
TIMEOUT_S = 120.0

Seconds = dict[str, float]


class Aware:
    """A list of tensors that can be taken out and put back, as both managers want it."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.shapes = [tensor.shape for tensor in tensors]

    @property
    def is_hollow(self) -> bool:
        return not self.tensors

    def pop_tensors(self) -> list[torch.Tensor]:
        taken, self.tensors = self.tensors, []
        return taken

    def insert_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def init_tensors(self) -> None:
        self.tensors = [torch.empty(shape) for shape in self.shapes]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Copy, as from a GPU."""
        self.tensors = [tensor.clone() for tensor in self.tensors]

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They stay where they are."""


class Bench:
    """This rank's clock, and what all ranks share."""

    def __init__(self, out: Path, memory: Path, rounds: int):
        self.out, self.memory, self.rounds = out, memory, rounds
        init_process_group(COMM)
        self.queue: Any = None
        if HAVE_NVRX:
            from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

            self.queue = AsyncCallsQueue(persistent=False)

    def case(self, count: int, nbytes: int) -> None:
        """Time both managers with a state of so many tensors."""
        live = [torch.full((nbytes // 4 // count,), float(COMM.rank)) for _ in range(count)]
        copies = [tensor.clone() for tensor in live]
        made: dict[str, Callable[[], Any]] = {"mlflash, copy": lambda: self.ours(count)}
        if HAVE_NVRX:
            made["NVRx, clique of 2"] = lambda: self.theirs(count)
        lose = {"mlflash, copy": self.lose_ours, "NVRx, clique of 2": self.lose_theirs}
        samples: dict[str, list[Seconds]] = {"memcpy": [], **{what: [] for what in made}}
        managers = {what: make() for what, make in made.items()}
        for step in range(1, 2 + self.rounds):
            for tensor in live:
                tensor += 1.0
            samples["memcpy"].append(slowest(lambda: self.memcpy(copies, live)))
            for what, manager in managers.items():
                samples[what].append(slowest(lambda: self.save(manager, live, step)))  # noqa: B023
                samples[what][-1] |= slowest(lambda: self.load(manager, live, "load"))  # noqa: B023
        for what in made:
            for sample in samples[what]:
                close(managers[what])
                lose[what](count)
                managers[what] = made[what]()
                sample |= slowest(lambda: self.load(managers[what], live, "after loss"))  # noqa: B023
            close(managers[what])
        self.write(f"{count} tensors of {nbytes // count >> 10} KiB", {what: all[1:] for what, all in samples.items()})

    def memcpy(self, copies: list[torch.Tensor], live: list[torch.Tensor]) -> Seconds:
        start = time.perf_counter()
        for copy, tensor in zip(copies, live, strict=True):
            copy.copy_(tensor)
        return {"stall": time.perf_counter() - start}

    def save(self, manager: Any, live: list[torch.Tensor], step: int) -> Seconds:
        start = time.perf_counter()
        request = manager.save(Aware(list(live)), step, is_async=True)
        if self.queue is not None:
            self.queue.schedule_async_request(request)
        stall_s = time.perf_counter() - start
        if self.queue is not None:
            self.queue.maybe_finalize_async_calls(blocking=True)
        else:
            request.execute_sync()
        return {"stall": stall_s, "total": time.perf_counter() - start}

    def load(self, manager: Any, live: list[torch.Tensor], what: str) -> Seconds:
        COMM.Barrier()
        start = time.perf_counter()
        assert manager.find_latest() > 0
        loaded, _ = manager.load()
        seconds = time.perf_counter() - start
        assert all(map(torch.equal, loaded.tensors, live)), what
        manager.latest_iteration = -1  # what was found is not remembered
        return {what: seconds}

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

    def write(self, case: str, samples: dict[str, list[Seconds]]) -> None:
        """Hand medians to the program that started the ranks."""
        memcpy = np.array([sample["stall"] for sample in samples["memcpy"]])
        for what, rounds in samples.items():
            of = {name: np.array([sample[name] for sample in rounds]) for name in rounds[0]}
            peer = {} if what == "memcpy" else samples.get("NVRx, clique of 2", [])
            theirs = {name: np.array([sample[name] for sample in peer]) for name in (of if peer else ())}
            row = {
                "case": case, "what": what,
                "seconds": {name: float(np.median(values)) for name, values in of.items()},
                "over memcpy": {name: float(np.median(values / memcpy)) for name, values in of.items()},
                "over NVRx": {name: float(np.median(of[name] / values)) for name, values in theirs.items()},
            }  # fmt: skip
            self.say(row)

    def say(self, line: dict[str, Any]) -> None:
        if COMM.rank == 0:
            with self.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def slowest(work: Callable[[], Seconds]) -> Seconds:
    """Do it on all ranks at once, and take the time of the slowest."""
    COMM.Barrier()
    seconds = work()
    return {name: COMM.allreduce(value, MPI.MAX) for name, value in seconds.items()}


def close(manager: Any) -> None:
    if isinstance(manager, LocalCheckpoints):
        manager.close()
    COMM.Barrier()


class _OnCpu(TorchFunctionMode):
    """NVRx sends replicas through "cuda"."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let NVRx work where there is no GPU."""
    warnings.filterwarnings("ignore", module="nvidia_resiliency_ext")  # of what it calls in torch
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    with _OnCpu():
        yield


def main() -> None:
    out, memory, nbytes, rounds, *counts = sys.argv[1:]
    bench = Bench(Path(out), Path(memory), int(rounds))
    allow(Aware)
    bench.say({"mpi": MPI.Get_library_version().split("\n")[0], "NVRx": "found" if HAVE_NVRX else "not installed"})
    with on_cpu() if not torch.cuda.is_available() else contextlib.nullcontext():
        for count in counts:
            bench.case(int(count), int(nbytes))
        if bench.queue is not None:
            bench.queue.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
