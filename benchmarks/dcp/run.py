"""Measures what PyTorch DCP costs through mlflash and through files, compared with a memcpy of the same bytes.

    python benchmarks/dcp/run.py [--large 64] [--large-mib 4] [--small 1000] [--repetitions 3] [--quick] [--json FILE]

Two ranks run on this machine under mpiexec, each on a node of its own. Files are written to /dev/shm. After
each load the ranks compare the loaded bits with the saved ones.

    stall   time until async_save returns
    total   time until its future is done
    load    time of dcp.load
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.aims import FILES, MEMCPY
from bench.clock import Action, Bench, Seconds
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import row
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mlflash.adapters.dcp import MemoryReader, MemoryWriter
from mlflash.adapters.distributed import init_process_group

ROW = 1024  # numbers of 4 bytes, in a small tensor on each rank and in a row of a large one
ROW_NBYTES = ROW * 4

Tensors = dict[str, torch.Tensor]


class Case:
    """A state, and all ways to save and load it.

    Args:
        bench: the clock.
        name: what the state is, for the table.
        tensors: the state to save, DTensors or tensors of 32-bit numbers.
        aims: which aims of bench/aims.py its times show, by column.
        group: for asynchronous saves, which communicate at the same time as training.
    """

    def __init__(self, bench: Bench, name: str, tensors: Tensors, group: Any, aims: Mapping[str, str]):
        self.bench, self.name, self.group, self.aims = bench, name, group, aims
        self.state, self.target = {"model": tensors}, {"model": {key: value.clone() for key, value in tensors.items()}}
        self.live, self.loaded = ([local(value) for value in state["model"].values()]
                                  for state in (self.state, self.target))  # fmt: skip
        self.copies = [value.clone() for value in self.live]
        self.step = 0

    def measure(self) -> None:
        """Time saves and loads in all ways."""
        files = self.bench.memory / "files"
        with contextlib.ExitStack() as stack:
            ways = {
                "mlflash, none": stack.enter_context(self.in_memory("none")),
                "mlflash, copy": stack.enter_context(self.in_memory("copy")),
                FILES: Way(lambda step: in_files(files / f"plain-{step}")),
                f"{FILES}, DefaultStager": Way(lambda step: in_files(files / f"staged-{step}"), reused_stager()),
            }
            actions: dict[str, Action] = {MEMCPY: self.memcpy}
            for what, way in ways.items():
                actions |= self.actions(what, way)
            samples = self.bench.repeat(actions, self.change)
        for what in ways:
            for column in ("stall", "total", "load"):
                over = {MEMCPY: samples[MEMCPY], FILES: samples[f"{FILES} {column}"]}
                shows = (self.aims if what.startswith("mlflash") else {}).get(column, "")
                self.bench.rows(row(what, samples[f"{what} {column}"], over, shows, case=self.name, column=column))

    def memcpy(self) -> None:
        for copy, value in zip(self.copies, self.live, strict=True):
            copy.copy_(value)

    def change(self) -> None:
        """Forget all files, and change every tensor, as a training step does."""
        self.bench.comm.Barrier()
        if self.bench.comm.rank == 0:
            shutil.rmtree(self.bench.memory / "files", ignore_errors=True)
        self.bench.comm.Barrier()
        self.step += 3
        torch._foreach_add_([value.view(torch.int32) for value in self.live], 1)

    def actions(self, what: str, way: Way) -> dict[str, Action]:
        """The actions of one way in a repetition, by name: saves of both kinds, and a load of each."""

        def save_async(step: int) -> Seconds:
            writer, _, checkpoint_id = way.open(step)
            start = time.perf_counter()
            future = dcp.async_save(self.state, checkpoint_id=checkpoint_id, storage_writer=writer,
                                    process_group=self.group, async_stager=way.stager)  # fmt: skip
            stall_s = time.perf_counter() - start
            future.result()
            return {f"{what} stall": stall_s, f"{what} total": time.perf_counter() - start}

        def save() -> None:
            writer, _, checkpoint_id = way.open(self.step + 2)
            dcp.save(self.state, checkpoint_id=checkpoint_id, storage_writer=writer)

        return {  # a real training uses one kind of save, so the timed async save follows another one
            f"{what}, async before": lambda: {} if save_async(self.step) else None,
            f"{what}, async": lambda: save_async(self.step + 1),
            f"{what}, checked": lambda: {} if self.load(what, way, self.step + 1) else None,
            f"{what}, again": save,
            f"{what}, loaded": lambda: self.load(what, way, self.step + 2),
        }

    def load(self, what: str, way: Way, step: int) -> Seconds:
        """Load a step, and compare the bits."""
        for value in self.loaded:
            value.zero_()
        _, reader, checkpoint_id = way.open(step)
        self.bench.comm.Barrier()
        start = time.perf_counter()
        dcp.load(self.target, checkpoint_id=checkpoint_id, storage_reader=reader)
        seconds = time.perf_counter() - start
        pairs = zip(self.live, self.loaded, strict=True)
        wrong = sum(not torch.equal(saved.view(torch.int32), value.view(torch.int32)) for saved, value in pairs)
        if wrong:
            raise RuntimeError(f"{self.name}, {what}: {wrong} of {len(self.live)} tensors differ from the saved ones")
        return {f"{what} load": seconds}

    @contextlib.contextmanager
    def in_memory(self, redundancy: str) -> Iterator[Way]:
        with self.bench.job(redundancy) as job, self.bench.checkpointer(job, redundancy=redundancy) as ckpt:
            writer, reader = MemoryWriter(ckpt), MemoryReader(ckpt)
            writer.prepare(self.state)
            yield Way(lambda step: (writer, reader, f"step-{step}"))
            writer.close()


class Way(NamedTuple):
    """A way to save and load.

    Attributes:
        open: gives the writer, the reader and the checkpoint_id of a step.
        stager: the stager for `dcp.async_save`. With None it is the writer's own.
    """

    open: Callable[[int], tuple[Any, Any, Any]]
    stager: Any = None


def in_files(path: Path) -> tuple[Any, Any, Any]:
    return dcp.FileSystemWriter(path, sync_files=False), dcp.FileSystemReader(path), path


def reused_stager() -> DefaultStager:
    return DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
                                        use_non_blocking_copy=False))  # fmt: skip


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def tensors_of(count: int, shape: tuple[int, ...], seed: int) -> Tensors:
    """Float tensors of random values."""
    random = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(shape, generator=random) for i in range(count)}


def ways(bench: Bench, large: int, large_nbytes: int, small: int) -> None:
    """Time all ways with large tensors, with small ones, and with tensors that are the same on all ranks."""
    bench.warm_up = 1
    init_process_group(comm=bench.comm)
    mesh, group = init_device_mesh("cpu", (bench.comm.size,)), dist.new_group(backend="gloo")
    for count, shape, aims in ((large, (large_nbytes // ROW_NBYTES, ROW), {"load": "dcp"}), (small, (ROW,), {})):
        shards = tensors_of(count, shape, bench.comm.rank)
        tensors = {key: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for key, value in shards.items()}
        Case(bench, f"{count} DTensors of {math.prod(shape) * 4 >> 10} KiB per rank", tensors, group, aims).measure()
    alike = f"{small} plain tensors of {ROW_NBYTES >> 10} KiB, the same on all ranks"
    small_aims = {column: f"dcp small {column}" for column in ("stall", "total", "load")}
    Case(bench, alike, tensors_of(small, (ROW,), 0), group, small_aims).measure()
    dist.destroy_process_group()


def main() -> int:
    parser = parser_of(__doc__, repetitions=3)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--large", type=int, default=64, help="number of large tensors on each rank")
    parser.add_argument("--large-mib", type=int, default=4, help="MiB of each of these on each rank")
    parser.add_argument("--small", type=int, default=1000, help="number of tensors of 4 KiB on each rank")
    args = parser.parse_args()
    if args.quick:
        args.large, args.large_mib, args.small, args.repetitions = 4, 1, 20, 1
    sizes = {"large": args.large, "large_nbytes": args.large_mib << 20, "small": args.small}
    return Question(args).run([Part(args.ranks, ways, sizes)])


if __name__ == "__main__":
    sys.exit(main())
