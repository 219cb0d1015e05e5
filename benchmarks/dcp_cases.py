"""What each rank of dcp.py does: save and load a state through DCP, into memory and into files, beside a memcpy.

A round runs everything one after the other, all ranks at once; the slowest rank counts. Ratios are made within a round
and their median is taken, so that a load that comes and goes hits both sides alike.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mlflash.adapters.dcp import MemoryReader, MemoryWriter
from mlflash.adapters.distributed import init_process_group
from mpi4py import MPI
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mlflash import Checkpointer

COMM = MPI.COMM_WORLD
ROW = 1024  # numbers of 4 bytes: a small tensor on each rank, and a row of a large one
ROW_NBYTES = ROW * 4
TIMEOUT_S = 120.0

Tensors = dict[str, torch.Tensor]
State = dict[str, Tensors]
Seconds = dict[str, float]


class Bench:
    """This rank's clock, and what all ranks share."""

    def __init__(self, out: Path, memory: Path, rounds: int):
        self.out, self.memory, self.rounds = out, memory, rounds
        init_process_group(COMM)
        self.mesh: DeviceMesh = init_device_mesh("cpu", (COMM.size,))
        self.group = dist.new_group(backend="gloo")  # an asynchronous save talks while training does

    def case(self, case: str, tensors: Tensors, targets: Tensors) -> None:
        """Time all ways to save and load a state.

        Args:
            case: what it is, for the table.
            tensors: DTensors or tensors of 32-bit numbers.
            targets: like them, to load into.
        """
        live, loaded = ([local(value) for value in values.values()] for values in (tensors, targets))
        state, blank = {"model": tensors}, {"model": targets}  # DCP wraps and logs each key of the outermost dict
        copies = [value.clone() for value in live]

        def memcpy() -> Seconds:
            start, cpu_start = time.perf_counter(), time.process_time()
            for copy, value in zip(copies, live, strict=True):
                copy.copy_(value)
            return {"stall": time.perf_counter() - start, "CPU": time.process_time() - cpu_start}

        with contextlib.ExitStack() as stack:
            ways: dict[str, Way] = {
                "mlflash, none": stack.enter_context(self.in_memory("none", state)),
                "mlflash, copy": stack.enter_context(self.in_memory("copy", state)),
                "FileSystemWriter": Way(lambda step: self.in_files("plain", step)),
                "FileSystemWriter, DefaultStager": Way(lambda step: self.in_files("staged", step), reused_stager()),
            }
            samples: dict[str, list[Seconds]] = {"memcpy": [], **{what: [] for what in ways}}
            for step in range(0, 2 * (1 + self.rounds), 2):
                change(live)
                samples["memcpy"].append(slowest(memcpy))
                for what, way in ways.items():
                    samples[what].append(slowest(lambda: self.save_async(way, state, step)))  # noqa: B023
                    self.load(way, blank, step)
                    check(live, loaded, f"{case}, {what}, dcp.async_save")
                    samples[what][-1] |= slowest(lambda: self.save(way, state, step + 1))  # noqa: B023
                    samples[what][-1] |= slowest(lambda: self.load(way, blank, step + 1))  # noqa: B023
                    check(live, loaded, f"{case}, {what}, dcp.save")
                self.forget_files()
        self.write(case, {what: rounds[1:] for what, rounds in samples.items()})

    def save_async(self, way: Way, state: State, step: int) -> Seconds:
        writer, _, checkpoint_id = way.open(step)
        start, cpu_start = time.perf_counter(), time.process_time()
        future = dcp.async_save(state, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=self.group,
                                async_stager=way.stager)  # fmt: skip
        stall_s = time.perf_counter() - start
        future.result()
        total_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return {"stall": stall_s, "total": total_s, "CPU": cpu_s}

    def save(self, way: Way, state: State, step: int) -> Seconds:
        writer, _, checkpoint_id = way.open(step)
        start = time.perf_counter()
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
        return {"sync": time.perf_counter() - start}

    def load(self, way: Way, blank: State, step: int) -> Seconds:
        for value in blank["model"].values():
            local(value).zero_()
        _, reader, checkpoint_id = way.open(step)
        COMM.Barrier()
        start = time.perf_counter()
        dcp.load(blank, checkpoint_id=checkpoint_id, storage_reader=reader)
        return {"load": time.perf_counter() - start}

    @contextlib.contextmanager
    def in_memory(self, redundancy: str, state: State) -> Iterator[Way]:
        """Open a Checkpointer; at the end remove what it left in memory."""
        settings: dict[str, Any] = {"memory": str(self.memory), "job": redundancy, "comm": COMM, "strict": True}
        with Checkpointer(redundancy=redundancy, timeout_s=TIMEOUT_S, **settings) as ckpt:
            writer, reader = MemoryWriter(ckpt), MemoryReader(ckpt)
            writer.prepare(state)
            yield Way(lambda step: (writer, reader, f"step-{step}"))
            writer.close()
        COMM.Barrier()
        if COMM.rank == 0:
            shutil.rmtree(self.memory / f"mlflash-{os.getuid()}" / redundancy)
        COMM.Barrier()

    def in_files(self, name: str, step: int) -> Open:
        path = self.memory / "files" / f"{name}-{step}"
        return dcp.FileSystemWriter(path, sync_files=False), dcp.FileSystemReader(path), path

    def forget_files(self) -> None:
        COMM.Barrier()
        if COMM.rank == 0:
            shutil.rmtree(self.memory / "files")
        COMM.Barrier()

    def write(self, case: str, samples: Mapping[str, Sequence[Seconds]]) -> None:
        """Write the rows of a table."""
        if COMM.rank:
            return
        memcpy = np.array([seconds["stall"] for seconds in samples["memcpy"]])
        with self.out.open("a") as file:
            for what, rounds in samples.items():
                by_name = {name: np.array([seconds[name] for seconds in rounds]) for name in rounds[0]}
                row = {
                    "case": case,
                    "what": what,
                    "seconds": {name: float(np.median(values)) for name, values in by_name.items()},
                    "over memcpy": {name: float(np.median(values / memcpy)) for name, values in by_name.items()},
                    "samples": {name: values.tolist() for name, values in by_name.items()},
                }
                file.write(json.dumps(row) + "\n")


Open = tuple[Any, Any, Any]  # a writer, a reader and the checkpoint_id of a step


class Way:
    """A way to save and load.

    Args:
        open: gives writer, reader and checkpoint_id of a step.
        stager: of `dcp.async_save`; None: that of the writer.
    """

    def __init__(self, open: Callable[[int], Open], stager: Any = None):
        self.open, self.stager = open, stager


def reused_stager() -> DefaultStager:
    return DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
                                        use_non_blocking_copy=False))  # fmt: skip


def slowest(action: Callable[[], Seconds]) -> Seconds:
    """Run it on all ranks at once; gives the largest of each of its numbers."""
    COMM.Barrier()
    seconds = action()
    most = np.empty(len(seconds))
    COMM.Allreduce(np.array(list(seconds.values())), most, MPI.MAX)
    return dict(zip(seconds, most.tolist(), strict=True))


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def change(live: list[torch.Tensor]) -> None:
    """Do what a training step does to a state: every tensor of it is new."""
    torch._foreach_add_([value.view(torch.int32) for value in live], 1)


def check(live: list[torch.Tensor], loaded: list[torch.Tensor], what: str) -> None:
    """Compare bits: the tensors hold any, NaN as well."""
    pairs = zip(live, loaded, strict=True)
    wrong = sum(not torch.equal(mine.view(torch.int32), theirs.view(torch.int32)) for mine, theirs in pairs)
    if wrong:
        raise RuntimeError(f"{what}: {wrong} of {len(live)} tensors of rank {COMM.rank} are not loaded as they were")


def tensors_of(count: int, shape: tuple[int, ...], seed: int) -> Tensors:
    """Tensors of any 32 bits."""
    bits = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randint(-(1 << 31), 1 << 31, shape, generator=bits,
                                                dtype=torch.int32).view(torch.float32)
            for i in range(count)}  # fmt: skip


def cloned(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}


def sharded(tensors: Tensors, mesh: DeviceMesh) -> Tensors:
    """Make each the shard of a DTensor."""
    return {name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for name, value in tensors.items()}


def main() -> None:
    out, memory = Path(sys.argv[1]), Path(sys.argv[2])
    large, large_nbytes, small, rounds = map(int, sys.argv[3:])
    bench = Bench(out, memory, rounds)
    if COMM.rank == 0:
        vendor, version = MPI.get_vendor()
        out.write_text(json.dumps({"mpi": f"{vendor} {'.'.join(map(str, version))}"}) + "\n")
    for count, shape in ((large, (large_nbytes // ROW_NBYTES, ROW)), (small, (ROW,))):
        what = f"{count} DTensors of {math.prod(shape) * 4 >> 10} KiB per rank"
        mine = tensors_of(count, shape, COMM.rank)
        bench.case(what, sharded(mine, bench.mesh), sharded(cloned(mine), bench.mesh))
    alike = tensors_of(small, (ROW,), 0)
    bench.case(f"{small} plain tensors of {ROW_NBYTES >> 10} KiB, the same on all ranks", alike, cloned(alike))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
