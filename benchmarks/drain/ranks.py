"""The program of each rank: it writes the same bytes to the same disk by dd, by PyTorch's writer and by a drain."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.aims import MEMCPY
from bench.clock import Action, Bench
from bench.rows import row
from mpi4py import MPI
from steps import slowdown
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mlflash.adapters.distributed import init_process_group

COMM = MPI.COMM_WORLD
DD = "dd, synced"

State = dict[str, DTensor]


def main() -> None:
    out, memory, disk = (Path(argument) for argument in sys.argv[1:4])
    tensors, nbytes, repetitions = (int(argument) for argument in sys.argv[4:7])
    torch.set_num_threads(1)
    init_process_group(comm=COMM, host="127.0.0.1")
    bench = Bench(COMM, out, memory, repetitions, warm_up=0)
    bench.header()
    state = state_of(tensors, nbytes)
    to_disk(bench, state, disk)
    slowdown(bench, state, disk, float(sys.argv[7]), quick=repetitions == 1)
    dist.destroy_process_group()


def state_of(tensors: int, nbytes: int) -> State:
    """Make tensors of random numbers. This rank holds ``nbytes`` of each."""
    mesh, numbers, rows = init_device_mesh("cpu", (COMM.size,)), np.random.default_rng(0), nbytes // 4096
    whole = (torch.from_numpy(numbers.standard_normal((rows * COMM.size, 1024)).astype("f4")) for _ in range(tensors))
    return {f"t{i}": distribute_tensor(one, mesh, [Shard(0)]) for i, one in enumerate(whole)}


def to_disk(bench: Bench, state: State, disk: Path) -> None:
    mine = [tensor.to_local().reshape(-1).view(torch.uint8).numpy() for tensor in state.values()]
    nbytes, scratch = sum(piece.nbytes for piece in mine), disk / "files"
    room = np.ones(nbytes, dtype=np.uint8)

    def memcpy() -> None:
        np.concatenate(mine, out=room)

    def plain() -> None:
        dcp.save(state, storage_writer=FileSystemWriter(scratch / "dcp", sync_files=True))

    def drain(form: str) -> Action:
        def action() -> dict[str, float]:
            with (
                bench.job(form) as job,
                bench.checkpointer(job, directory=disk / form, redundancy="none", format=form) as ckpt,
            ):
                ckpt.save(1, state).wait()
                return {f"drained, {form}": seconds_of(lambda: ckpt.drain().wait())}

        return action

    def forget() -> None:
        COMM.Barrier()
        if COMM.rank == 0:
            for path in (scratch, disk / "hdf5", disk / "dcp"):
                shutil.rmtree(path, ignore_errors=True)
        COMM.Barrier()

    actions: dict[str, Action] = {
        MEMCPY: memcpy, DD: lambda: dd(scratch / f"dd{COMM.rank}", nbytes), "plain": plain, "hdf5": drain("hdf5"),
        "dcp": drain("dcp"),
    }  # fmt: skip
    samples = bench.repeat(actions, before=forget)
    forget()
    over = {DD: samples[DD], MEMCPY: samples[MEMCPY]}
    names = {MEMCPY: MEMCPY, DD: DD, "dcp.save, FileSystemWriter, synced": "plain",
             "mlflash drain, hdf5": "drained, hdf5", "mlflash drain, dcp": "drained, dcp"}  # fmt: skip
    for what, name in names.items():
        rate = nbytes * COMM.size / float(np.median(samples[name])) / 1e9
        bench.rows(row(what, samples[name], over, case="To the disk", note=f"{rate:.2f} GB/s"))


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds of some work, which begins when all ranks are ready."""
    COMM.Barrier()
    start = MPI.Wtime()
    work()
    return MPI.Wtime() - start


def dd(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={nbytes}", "iflag=count_bytes", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
