"""The program of each rank: it saves and loads a state through DCP, in memory and in files, and times a memcpy."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.aims import MEMCPY
from bench.clock import Action, Bench, Seconds
from bench.rows import Samples, row
from mpi4py import MPI
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mlflash import Checkpointer
from mlflash.adapters.dcp import MemoryReader, MemoryWriter
from mlflash.adapters.distributed import init_process_group

COMM = MPI.COMM_WORLD
ROW = 1024  # numbers of 4 bytes, in a small tensor on each rank and in a row of a large one
ROW_NBYTES = ROW * 4
TIMEOUT_S = 120.0
COLUMNS = ("stall", "total", "CPU", "sync", "load")

Tensors = dict[str, torch.Tensor]
State = dict[str, Tensors]


class Ways:
    """Times all ways to save and load a state.

    Args:
        bench: the clock.
    """

    def __init__(self, bench: Bench):
        self.bench, self.memory = bench, bench.memory
        init_process_group(comm=COMM)
        self.mesh: DeviceMesh = init_device_mesh("cpu", (COMM.size,))
        self.group = dist.new_group(backend="gloo")  # an asynchronous save communicates at the same time as training
        self.step = 0

    def case(self, case: str, tensors: Tensors, targets: Tensors) -> None:
        """Time all ways to save and load a state.

        Args:
            case: what the state is, for the table.
            tensors: the state to save, DTensors or tensors of 32-bit numbers.
            targets: tensors of the same shapes, to load into.
        """
        live, loaded = ([local(value) for value in values.values()] for values in (tensors, targets))
        state, blank = {"model": tensors}, {"model": targets}  # DCP wraps and logs each key of the outermost dict
        copies = [value.clone() for value in live]

        def memcpy() -> None:
            for copy, value in zip(copies, live, strict=True):
                copy.copy_(value)

        def before() -> None:
            self.forget_files()
            self.step += 3
            change(live)

        with contextlib.ExitStack() as stack:
            ways: dict[str, Way] = {
                "mlflash, none": stack.enter_context(self.in_memory("none", state)),
                "mlflash, copy": stack.enter_context(self.in_memory("copy", state)),
                "FileSystemWriter": Way(lambda step: self.in_files("plain", step)),
                "FileSystemWriter, DefaultStager": Way(lambda step: self.in_files("staged", step), reused_stager()),
            }
            actions: dict[str, Action] = {MEMCPY: memcpy}
            for what, way in ways.items():
                actions |= self.actions(
                    f"{case}, {what}", what, way, state, blank, lambda what: check(live, loaded, what)
                )
            samples = self.bench.repeat(actions, before)
            self.forget_files()
        self.write(case, samples, list(ways))

    def actions(
        self, title: str, what: str, way: Way, state: State, blank: State, check: Callable[[str], None]
    ) -> dict[str, Action]:
        """The actions of one way in a repetition, by name: saves of both kinds, and a load of each."""

        def save_async(step: int) -> Seconds:
            writer, _, checkpoint_id = way.open(step)
            start = time.perf_counter()
            future = dcp.async_save(state, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=self.group,
                                    async_stager=way.stager)  # fmt: skip
            stall_s = time.perf_counter() - start
            future.result()
            return {f"{what} stall": stall_s, f"{what} total": time.perf_counter() - start}

        def save() -> Seconds:
            writer, _, checkpoint_id = way.open(self.step + 2)
            start = time.perf_counter()
            dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
            return {f"{what} sync": time.perf_counter() - start}

        def load(how: str, step: int) -> Seconds:
            for value in blank["model"].values():
                local(value).zero_()
            _, reader, checkpoint_id = way.open(step)
            COMM.Barrier()
            start = time.perf_counter()
            dcp.load(blank, checkpoint_id=checkpoint_id, storage_reader=reader)
            seconds = time.perf_counter() - start
            check(f"{title}, {how}")
            return {f"{what} load": seconds} if how == "dcp.save" else {}

        return {  # a real training uses one kind of save, so the timed async save follows another one
            f"{what}, async before": lambda: {} if save_async(self.step) else None,
            f"{what}, async": lambda: save_async(self.step + 1),
            f"{what}, checked": lambda: load("dcp.async_save", self.step + 1),
            f"{what}, again": save,
            f"{what}, loaded": lambda: load("dcp.save", self.step + 2),
        }

    @contextlib.contextmanager
    def in_memory(self, redundancy: str, state: State) -> Iterator[Way]:
        """Open a Checkpointer; afterwards remove what it left in memory."""
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
            shutil.rmtree(self.memory / "files", ignore_errors=True)
        COMM.Barrier()

    def write(self, case: str, samples: Samples, ways: Sequence[str]) -> None:
        """Write the rows of a table, with one column for each kind of time."""
        over = {MEMCPY: samples[MEMCPY]}
        used = {"stall": samples[MEMCPY], "CPU": samples[f"{MEMCPY} CPU"]}
        self.bench.rows(*(row("memcpy", values, over, case=case, column=column) for column, values in used.items()))
        for what in ways:
            for column in COLUMNS:
                values = samples[f"{what}, async CPU" if column == "CPU" else f"{what} {column}"]
                shows = "dcp" if column == "load" and what.startswith("mlflash") else ""
                self.bench.rows(row(what, values, over, shows, case=case, column=column))


Open = tuple[Any, Any, Any]  # the writer, the reader and the checkpoint_id of a step


class Way:
    """A way to save and load.

    Args:
        open: gives the writer, the reader and the checkpoint_id of a step.
        stager: the stager for `dcp.async_save`. With None it is the writer's own.
    """

    def __init__(self, open: Callable[[int], Open], stager: Any = None):
        self.open, self.stager = open, stager


def reused_stager() -> DefaultStager:
    return DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
                                        use_non_blocking_copy=False))  # fmt: skip


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def change(live: list[torch.Tensor]) -> None:
    """Change every tensor, as a training step does."""
    torch._foreach_add_([value.view(torch.int32) for value in live], 1)


def check(live: list[torch.Tensor], loaded: list[torch.Tensor], what: str) -> None:
    """Compare the bits as integers, because the tensors also hold NaN."""
    pairs = zip(live, loaded, strict=True)
    wrong = sum(not torch.equal(mine.view(torch.int32), theirs.view(torch.int32)) for mine, theirs in pairs)
    if wrong:
        raise RuntimeError(
            f"{what}: {wrong} of {len(live)} tensors loaded on rank {COMM.rank} differ from the saved ones"
        )


def tensors_of(count: int, shape: tuple[int, ...], seed: int) -> Tensors:
    """Float tensors of random bits, with all values that 32 bits can have."""
    bits = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randint(-(1 << 31), 1 << 31, shape, generator=bits,
                                                dtype=torch.int32).view(torch.float32)
            for i in range(count)}  # fmt: skip


def cloned(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}


def sharded(tensors: Tensors, mesh: DeviceMesh) -> Tensors:
    """Make each tensor this rank's shard of a DTensor."""
    return {name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for name, value in tensors.items()}


def main() -> None:
    out, memory = Path(sys.argv[1]), Path(sys.argv[2])
    large, large_nbytes, small, repetitions = map(int, sys.argv[3:])
    bench = Bench(COMM, out, memory, repetitions, warm_up=1)
    bench.header()
    ways = Ways(bench)
    for count, shape in ((large, (large_nbytes // ROW_NBYTES, ROW)), (small, (ROW,))):
        what = f"{count} DTensors of {math.prod(shape) * 4 >> 10} KiB per rank"
        mine = tensors_of(count, shape, COMM.rank)
        ways.case(what, sharded(mine, ways.mesh), sharded(cloned(mine), ways.mesh))
    alike = tensors_of(small, (ROW,), 0)
    ways.case(f"{small} plain tensors of {ROW_NBYTES >> 10} KiB, the same on all ranks", alike, cloned(alike))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
