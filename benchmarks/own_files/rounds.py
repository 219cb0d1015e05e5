"""Times several ways to save a training, one after the other, and a memcpy of the bytes that one of them wrote."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # warnings of frameworks, which are imported after this

import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.aims import MEMCPY
from bench.clock import Action, Bench, Seconds, slowest
from bench.rows import row
from mpi4py import MPI

from mlflash import Checkpointer

ITSELF, OURS, ASYNC, DCP = "by itself", "in_background=True", "its asynchronous way", "dcp.async_save"
STALL = "stall"
PER_PARAMETER = 12  # bytes: the parameter and two moments of Adam
TENSOR_NBYTES = 4 << 20  # size of most tensors in these models
UNTIMED = 4  # saves in memory that do not count: they make the slots and register the optimizers


@dataclasses.dataclass
class Way:
    """One way to save.

    Attributes:
        save: saves into a directory. Training waits until it returns.
        finish: waits until everything is written.
    """

    save: Callable[[Path], object]
    finish: Callable[[], object] = lambda: None


class Rounds:
    """The measurements of a framework.

    Args:
        bench: the clock.
        disk: a directory on the disk.
        mib: approximate size of a checkpoint.

    Attributes:
        comm: all ranks.
        memory: the directory in memory for the Checkpointer.
        parameters: the number of parameters of the model.
        steps: the number of training steps.
    """

    def __init__(self, bench: Bench, disk: Path, mib: int):
        bench.warm_up = 1
        self._bench, self.comm, self.memory, self._disk = bench, bench.comm, str(bench.memory), disk
        self.parameters = (mib << 20) // PER_PARAMETER
        self.steps = 1 + UNTIMED + bench.repetitions + 1  # one before all saves, and one after them
        self._saves = list[dict[str, float]]()
        self._counted = {STALL: 0.0, "nbytes": 0.0}

    def measure(self, case: str, ways: Mapping[str, Way]) -> None:
        """Time all ways, of which the first is the framework's own, and write their rows. Collective."""
        folder = self._disk / "saves"
        next(iter(ways.values())).save(folder / "first")
        nbytes = self.comm.bcast(size_of(folder))
        source, target = np.ones(nbytes, dtype=np.uint8), np.full(nbytes, 2, dtype=np.uint8)
        actions: dict[str, Action] = {MEMCPY: lambda: None if self.comm.rank else np.copyto(target, source)}
        for number, (what, way) in enumerate(ways.items()):
            actions[what] = lambda what=what, way=way, number=number: self._timed(  # type: ignore[misc]
                what, way, folder / str(number), nbytes
            )
        samples = self._bench.repeat(actions, before=lambda: self._clean(folder))
        self._clean(folder)
        over, case = {MEMCPY: samples[MEMCPY]}, f"{case}, {nbytes >> 20} MiB"
        for what in ways:
            self._bench.rows(row(case, samples[f"{what} {STALL}"], over, case="The stall of a framework's own files",
                                 column=what))  # fmt: skip

    def _timed(self, what: str, way: Way, folder: Path, nbytes: int) -> Seconds:
        start = MPI.Wtime()
        way.save(folder)
        stall_s = MPI.Wtime() - start
        way.finish()
        self.comm.Barrier()
        if self.comm.rank == 0:
            sync(folder)
            if size_of(folder) < nbytes * 0.9:  # formats store different things in addition to tensors
                raise RuntimeError(f"{what} wrote {size_of(folder)} bytes instead of {nbytes}")
        return {f"{what} {STALL}": stall_s}

    def _clean(self, folder: Path) -> None:
        """Remove everything that the ways of a round have written. Collective."""
        self.comm.Barrier()
        if self.comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        self.comm.Barrier()

    def after_save(self, checkpointer: Checkpointer | None) -> None:
        """Note how long training waited for a save in memory, and time a memcpy of as many bytes. Collective."""
        assert checkpointer is not None
        checkpointer.wait()
        report = checkpointer.report()
        counted = {STALL: report["seconds"].get("stall", 0.0), "nbytes": report["counts"].get("bytes staged", 0)}
        stall_s, nbytes = (counted[name] - self._counted[name] for name in counted)
        self._counted = counted
        source, target = np.ones(int(nbytes), dtype=np.uint8), np.full(int(nbytes), 2, dtype=np.uint8)
        self.comm.Barrier()
        start = MPI.Wtime()
        for at in range(0, source.nbytes, TENSOR_NBYTES):
            np.copyto(target[at : at + TENSOR_NBYTES], source[at : at + TENSOR_NBYTES])
        self._saves.append({MEMCPY: MPI.Wtime() - start, STALL: stall_s, "nbytes": nbytes})

    def show_in_memory(self, case: str) -> None:
        """Write a row of the saves in memory, except the first ones. Collective."""
        saves = [slowest(self.comm, save) for save in self._saves[UNTIMED:]]
        stalls, memcpys = (np.array([save[name] for save in saves]) for name in (STALL, MEMCPY))
        nbytes = int(saves[-1]["nbytes"])
        self._bench.rows(row(f"{case}: {nbytes >> 20} MiB of a rank", stalls, {MEMCPY: memcpys}, "lazy",
                             case="Saves in memory, copied while training goes on: the stall of save"))  # fmt: skip


def dcp_way(state: Callable[[], dict[str, Any]]) -> Way:
    """Return PyTorch's asynchronous save, which writes in a thread."""
    group, saves = dist.new_group(backend="gloo"), list[Any]()

    def save(folder: Path) -> None:
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        saves.append(dcp.async_save(state(), storage_writer=writer, process_group=group))

    return Way(save, lambda: saves.pop().result())


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def sync(folder: Path) -> None:
    """Wait until the disk has all files. Files that it already has cost no time."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
