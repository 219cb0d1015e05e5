"""What the ranks of benchmarks/drain.py do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mlflash.adapters.distributed import init_process_group
from mpi4py import MPI
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mlflash

COMM = MPI.COMM_WORLD


def main() -> None:
    out, memory, disk = (Path(argument) for argument in sys.argv[1:4])
    tensors, nbytes, rounds, step_s = (float(argument) for argument in sys.argv[4:])
    torch.set_num_threads(1)
    init_process_group(COMM, host="127.0.0.1")
    mesh = init_device_mesh("cpu", (COMM.size,))
    rows = int(nbytes) // 4096
    numbers = np.random.default_rng(0)
    state = {}
    for i in range(int(tensors)):
        whole = torch.from_numpy(numbers.standard_normal((rows * COMM.size, 1024)).astype("f4"))
        state[f"t{i}"] = distribute_tensor(whole, mesh, [Shard(0)])
    mine = sum(tensor.to_local().nbytes for tensor in state.values())
    note = Notes(out, mine)
    scratch = disk / "files"
    for _ in range(int(rounds)):
        note.time("memcpy", lambda: copy(state, mine))
        note.time("dd, synced", lambda: dd(scratch / f"dd{COMM.rank}", mine))
        note.time("dcp.save, FileSystemWriter, synced", lambda: dcp.save(
            state, storage_writer=FileSystemWriter(scratch / "dcp", sync_files=True)))  # fmt: skip
        for form in ("hdf5", "dcp"):
            with mlflash.Checkpointer(
                disk / form, job=form, memory=str(memory), redundancy="none", format=form
            ) as ckpt:
                ckpt.save(1, state).wait()
                note.time(f"mlflash drain, {form}", lambda: ckpt.drain().wait())  # noqa: B023
            COMM.Barrier()
            if COMM.rank == 0:
                shutil.rmtree(disk / form)
        COMM.Barrier()
        if COMM.rank == 0:
            shutil.rmtree(scratch)
        COMM.Barrier()
    note.write()
    slowdown(note, state, memory, disk, step_s, quick=rounds == 1)
    dist.destroy_process_group()


def copy(state: dict[str, Any], nbytes: int) -> None:
    room = np.empty(nbytes, dtype=np.uint8)
    room[:] = 1
    begun = time.perf_counter()
    at = 0
    for tensor in state.values():
        raw = tensor.to_local().reshape(-1).view(torch.uint8).numpy()
        np.copyto(room[at : at + raw.nbytes], raw)
        at += raw.nbytes
    raise Measured(time.perf_counter() - begun)


def dd(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={nbytes}", "iflag=count_bytes", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


class Measured(Exception):
    """Brings a time that is not that of the whole call."""


class Notes:
    """Times of all ranks together: from when the first begins until the last is through."""

    def __init__(self, out: Path, nbytes: int):
        self._out, self.nbytes = out, nbytes
        self._seconds: dict[str, list[float]] = {}

    def time(self, what: str, work: Callable[[], object]) -> None:
        COMM.Barrier()
        begun = time.perf_counter()
        try:
            work()
            seconds = time.perf_counter() - begun
        except Measured as measured:
            (seconds,) = measured.args
        self._seconds.setdefault(what, []).append(COMM.allreduce(seconds, MPI.MAX))

    def write(self) -> None:
        for what, seconds in self._seconds.items():
            rate = self.nbytes * COMM.size / median(seconds) / 1e9
            self.line({"what": what, "seconds": median(seconds), "GB/s": rate})

    def line(self, row: dict[str, Any]) -> None:
        if COMM.rank == 0:
            with self._out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def slowdown(note: Notes, state: dict[str, Any], memory: Path, disk: Path, step_s: float, quick: bool) -> None:
    """Steps of a training (matrix products on one thread, an allreduce of their result), with and without a drain."""
    a = torch.randn(512, 512)

    def products(seconds: float) -> int:
        done, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            torch.mm(a, a)
            done += 1
        return done

    products(1.0)  # warm up
    times = max(1, products(step_s))

    def steps(seconds: float) -> list[float]:
        found = []
        end = time.perf_counter() + seconds
        while COMM.bcast(time.perf_counter() < end):
            begun = time.perf_counter()
            for _ in range(times):
                torch.mm(a, a)
            COMM.allreduce(1)
            found.append(time.perf_counter() - begun)
        return found

    def line(what: str, before: list[float], during: list[float]) -> None:
        mean = [sum(found) / max(1, len(found)) for found in (before + steps(window_s), during)]
        note.line({"what": what, "without, ms": 1e3 * mean[0], "with, ms": 1e3 * mean[1],
                   "slowdown": mean[1] / mean[0] - 1, "steps": len(during)})  # fmt: skip

    directory = disk / "slowdown"
    window_s = 0.5 if quick else 3.0
    rates = {"as fast as it goes": 0.0, "at 100 MB/s": 1e8, "at 30 MB/s": 3e7}
    for name, rate in list(rates.items())[: 1 if quick else None]:
        COMM.Barrier()
        before = steps(window_s)
        directory.mkdir(exist_ok=True)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, directory / str(COMM.rank), str(note.nbytes), str(rate / COMM.size)]
        )
        line(
            f"a process that writes zeros, {name}",
            before,
            steps_until(lambda writer=writer: writer.poll() is not None, steps),
        )
        COMM.Barrier()
        with mlflash.Checkpointer(directory, job="s", memory=str(memory), redundancy="none", drain_rate=rate) as ckpt:
            ckpt.save(1, state).wait()
            before = steps(window_s)
            drain = ckpt.drain()
            during = steps_until(lambda drain=drain: drain.done, steps)
            drain.given_up.set()
        line(f"a drain, {name}", before, during)
        COMM.Barrier()
        if COMM.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            shutil.rmtree(memory / f"mlflash-{os.getuid()}", ignore_errors=True)
        COMM.Barrier()


def steps_until(ended: Callable[[], bool], steps: Callable[[float], list[float]]) -> list[float]:
    """Steps until all ranks have ended something, but not many thousand."""
    found: list[float] = []
    while not COMM.allreduce(int(ended()), MPI.MIN) and len(found) < 2000:
        found += steps(0.2)
    return found


# What any program has to do that brings so many bytes to the disk at that rate.
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


if __name__ == "__main__":
    main()
