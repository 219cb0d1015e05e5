"""Measures how fast checkpoints get from memory to a disk, and how this slows training.

    python benchmarks/drain/run.py [--disk DIR] [--ranks 2] [--mib 128] [--repetitions 3] [--quick] [--json FILE]

The ranks run under mpiexec, each on a node of its own. A drain, dd and PyTorch's writer write the same number
of bytes to the same disk, and wait until the disk has them. dd writes zeros, which some disks take faster. Then a
training runs beside a drain, and beside a process that only writes zeros at the same rate.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.aims import MEMCPY
from bench.clock import Action, Bench
from bench.launch import Part
from bench.question import Question, parser_of
from bench.rows import Row, row
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mlflash.adapters.distributed import init_process_group

DD = "dd, synced"
TENSORS = 64
RATES = {"as fast as it goes": 0.0, "at 30 MB/s": 3e7}  # bytes per second of all ranks
MOST_STEPS = 2000
ALONE = "a step without a drain"
# What any program must do that writes this number of bytes to the disk at this rate.
WRITER = """
import os, sys, time
path, nbytes, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
chunk, start, sent = bytes(8 << 20), time.monotonic(), 0
with open(path, "wb", buffering=0) as file:
    while sent < nbytes:
        sent += file.write(chunk[: nbytes - sent])
        while rate and (ahead := sent / rate - (time.monotonic() - start)) > 0:
            time.sleep(ahead)
    os.fsync(file.fileno())
"""

State = dict[str, DTensor]


def drains(bench: Bench, disk: str, nbytes: int, step_s: float, alone: int) -> None:
    """Time writes to the disk, then steps of a training beside them."""
    torch.set_num_threads(1)
    init_process_group(comm=bench.comm, host="127.0.0.1")
    bench.warm_up = 0
    state = state_of(bench.comm, nbytes // TENSORS)
    to_disk(bench, state, Path(disk))
    slowdown(bench, state, Path(disk), step_s, alone)
    dist.destroy_process_group()


def state_of(comm: MPI.Comm, nbytes: int) -> State:
    """Make tensors of random numbers. This rank holds ``nbytes`` of each."""
    mesh, numbers = init_device_mesh("cpu", (comm.size,)), np.random.default_rng(0)
    shape = (nbytes // 4096 * comm.size, 1024)
    tensors = (torch.from_numpy(numbers.standard_normal(shape).astype("f4")) for _ in range(TENSORS))
    return {f"t{i}": distribute_tensor(tensor, mesh, [Shard(0)]) for i, tensor in enumerate(tensors)}


def to_disk(bench: Bench, state: State, disk: Path) -> None:
    pieces = [tensor.to_local().reshape(-1).view(torch.uint8).numpy() for tensor in state.values()]
    nbytes = sum(piece.nbytes for piece in pieces)
    target = np.ones(nbytes, dtype=np.uint8)

    def memcpy() -> None:
        np.concatenate(pieces, out=target)

    def plain() -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(disk / "files", sync_files=True))

    def drain(form: str) -> Action:
        def action() -> dict[str, float]:
            settings: dict[str, Any] = {"directory": disk / form, "redundancy": "none", "format": form}
            with bench.job(form) as job, bench.checkpointer(job, **settings) as ckpt:
                ckpt.save(1, state).wait()
                bench.comm.Barrier()
                start = time.perf_counter()
                ckpt.drain().wait()
                return {f"mlflash drain, {form}": time.perf_counter() - start}

        return action

    def forget() -> None:
        bench.comm.Barrier()
        if bench.comm.rank == 0:
            for name in ("dd", "files", "hdf5", "dcp"):
                shutil.rmtree(disk / name, ignore_errors=True)
        bench.comm.Barrier()

    files = "dcp.save, FileSystemWriter, synced"
    actions: dict[str, Action] = {
        MEMCPY: memcpy, DD: lambda: dd(disk / "dd" / str(bench.comm.rank), nbytes), files: plain,
        "hdf5": drain("hdf5"), "dcp": drain("dcp"),
    }  # fmt: skip
    samples = bench.repeat(actions, before=forget)
    forget()
    for what in (MEMCPY, DD, files, "mlflash drain, hdf5", "mlflash drain, dcp"):
        rate = nbytes * bench.comm.size / float(np.median(samples[what])) / 1e9
        bench.rows(row(what, samples[what], {DD: samples[DD]}, case="To the disk", note=f"{rate:.2f} GB/s"))


def dd(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={nbytes}", "iflag=count_bytes", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


class Training:
    """Makes steps of matrix products on one thread, about ``step_s`` seconds of them, and an allreduce."""

    def __init__(self, comm: MPI.Intracomm, step_s: float):
        self._comm, self._a, self._times = comm, torch.randn(512, 512), 1
        product_s = min(self.steps(lambda: False, least=20))
        self._times = max(1, round(step_s / product_s))

    def steps(self, is_running: Callable[[], bool], least: int = 0) -> list[float]:
        """Train while something is running on any rank. Return the seconds of each step."""
        steps: list[float] = []
        while (self._comm.allreduce(int(is_running())) and len(steps) < MOST_STEPS) or len(steps) < least:
            start = time.perf_counter()
            for _ in range(self._times):
                torch.mm(self._a, self._a)
            self._comm.allreduce(1)
            steps.append(time.perf_counter() - start)
        return steps


def slowdown(bench: Bench, state: State, disk: Path, step_s: float, alone: int) -> None:
    """Train during a drain, and during a process that only writes as many bytes at the same rate.

    Args:
        bench: the clock.
        state: what is drained.
        disk: a directory on the disk.
        step_s: seconds of a step.
        alone: number of steps without a drain, before and after each of them.
    """
    training, directory = Training(bench.comm, step_s), disk / "slowdown"
    nbytes = sum(tensor.to_local().nbytes for tensor in state.values())

    def timed(what: str, is_running: Callable[[], bool], before: list[float]) -> None:
        during = training.steps(is_running, least=1)
        alone_s = float(np.mean(before + training.steps(lambda: False, alone)))
        # The means, because a drain works in bursts. The quartiles are those of single steps.
        over = [float(np.mean(during)), *np.quantile(during, (0.25, 0.75)).tolist()]
        bench.rows(Row(what=what, case="Steps beside it: the mean, with quartiles of single steps", seconds=over[0],
                       over={ALONE: [seconds / alone_s for seconds in over]}))  # fmt: skip

    for name, rate in RATES.items():
        directory.mkdir(exist_ok=True)
        before = training.steps(lambda: False, alone)
        arguments = [str(directory / str(bench.comm.rank)), str(nbytes), str(rate / bench.comm.size)]
        writer = subprocess.Popen([sys.executable, "-c", WRITER, *arguments])
        timed(f"a process that writes zeros, {name}", lambda: writer.poll() is None, before)  # noqa: B023
        settings: dict[str, Any] = {"directory": directory, "redundancy": "none", "drain_rate": rate}
        with bench.job("slowdown") as job, bench.checkpointer(job, **settings) as ckpt:
            ckpt.save(1, state).wait()
            before = training.steps(lambda: False, alone)
            drain = ckpt.drain()
            timed(f"a drain, {name}", lambda: not drain.done, before)  # noqa: B023
        if bench.comm.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        bench.comm.Barrier()


def main() -> int:
    parser = parser_of(__doc__, repetitions=3)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--mib", type=int, default=128, help="MiB per rank, in 64 tensors")
    parser.add_argument("--step-ms", type=float, default=50, help="milliseconds of a training step")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 16, 1
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="mlflash-bench-") as disk:
        arguments = {"disk": disk, "nbytes": args.mib << 20, "step_s": args.step_ms / 1e3,
                     "alone": 10 if args.quick else 60}  # fmt: skip
        return Question(args).run([Part(args.ranks, drains, arguments)])


if __name__ == "__main__":
    sys.exit(main())
