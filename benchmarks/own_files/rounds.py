"""Times several ways to save a training, one after the other, and a memcpy of the bytes that one of them wrote."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # warnings of frameworks, which are imported after this

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from bench.aims import MEMCPY  # noqa: E402
from bench.clock import Action, Bench, Seconds, slowest  # noqa: E402
from bench.rows import row  # noqa: E402
from mpi4py import MPI  # noqa: E402

from mlflash import Checkpointer  # noqa: E402

COMM = MPI.COMM_WORLD
ITSELF, OURS, DCP = "by itself", "in_background=True", "dcp.async_save of the same tensors"
PER_PARAMETER = 12  # bytes: the parameter and two moments of Adam
TENSOR_NBYTES = 4 << 20  # size of most tensors in these models
STALL, STEP = "stall", "step"
IN_MEMORY_BEFORE = 4  # saves that do not count: they make the slots and register the optimizers


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
    """The measurements that run.py asks for.

    Attributes:
        memory: the directory in memory for the Checkpointer.
        parameters: the number of parameters of the model.
        steps: the number of training steps, with one before the saves in memory and one after them.
    """

    def __init__(self) -> None:
        out, self.memory, disk, mib, repetitions = sys.argv[1:]
        self._bench = Bench(COMM, Path(out), Path(self.memory), int(repetitions), warm_up=1)
        self._disk = Path(disk)
        self._source = self._target = np.empty(0, dtype=np.uint8)
        self._ended = 0.0
        self.parameters = (int(mib) << 20) // PER_PARAMETER
        self._saves = list[dict[str, float]]()
        self.steps = 1 + IN_MEMORY_BEFORE + 2 * int(repetitions) + 1  # one before all saves, and one after them

    def measure(self, case: str, ways: Mapping[str, Way]) -> None:
        """Time all ways, and write their rows. Collective.

        Args:
            case: the framework, for the title of the table.
            ways: the ways, by name. The first one is the framework's own.
        """
        folder = self._disk / "saves"
        next(iter(ways.values())).save(folder / "first")
        nbytes = COMM.bcast(size_of(folder))
        source, target = np.ones(nbytes, dtype=np.uint8), np.full(nbytes, 2, dtype=np.uint8)
        actions: dict[str, Action] = {MEMCPY: lambda: None if COMM.rank else np.copyto(target, source)}
        for number, (what, way) in enumerate(ways.items()):
            actions[what] = lambda what=what, way=way, number=number: timed(  # type: ignore[misc]
                what, way, folder / str(number), nbytes
            )
        samples = self._bench.repeat(actions, before=lambda: clean(folder))
        clean(folder)
        over, case = {MEMCPY: samples[MEMCPY]}, f"{case}: {nbytes >> 20} MiB"
        self._bench.rows(row("memcpy", samples[MEMCPY], over, case=case, column="stall"))
        for what in ways:
            for column in ("stall", "on disk"):
                self._bench.rows(row(what, samples[f"{what} {column}"], over, case=case, column=column))

    def in_memory(self, checkpointer: Checkpointer, save: Callable[[], object]) -> None:
        """Save in memory at the end of a step. Time the save and the wait in the next step. Collective.

        Every second save copies everything before it returns.

        Args:
            checkpointer: the Checkpointer of the save.
            save: saves in the same way as the adapter at the end of a step.
        """
        lazy = checkpointer._saves.lazy
        if not self._saves:
            lazy.steps.hold_back = self._with_wait(lazy.steps.hold_back)  # type: ignore[method-assign]
        else:
            self._saves[-1][STEP] = MPI.Wtime() - self._ended
            self._grow(max(one.nbytes for one in checkpointer._saves._pending))
        lazy._is_on = len(self._saves) % 2 == 0
        checkpointer.wait()
        COMM.Barrier()
        copied = MPI.Wtime()
        for at in range(0, self._source.nbytes, TENSOR_NBYTES):
            np.copyto(self._target[at : at + TENSOR_NBYTES], self._source[at : at + TENSOR_NBYTES])
        COMM.Barrier()
        start = MPI.Wtime()
        save()
        self._ended = MPI.Wtime()
        self._saves.append({MEMCPY: start - copied, STALL: self._ended - start, STEP: 0.0})

    def _grow(self, nbytes: int) -> None:
        if self._source.nbytes != nbytes:
            self._source, self._target = np.ones(nbytes, dtype=np.uint8), np.full(nbytes, 2, dtype=np.uint8)

    def _with_wait(self, hold_back: Callable[[], None]) -> Callable[[], None]:
        def timed_wait() -> None:
            start = MPI.Wtime()
            hold_back()
            if self._saves:
                self._saves[-1][STALL] += MPI.Wtime() - start

        return timed_wait

    def show_in_memory(self, case: str) -> None:
        """Write the rows of all saves in memory, except the first ones. Collective."""
        kept = [slowest(COMM, one) for one in self._saves[IN_MEMORY_BEFORE:-1]]
        late, eager = kept[::2], kept[1::2]
        memcpy = np.array([one[MEMCPY] for one in kept])
        case = f"{case}, in memory: {self._source.nbytes >> 20} MiB of a rank"
        self._bench.rows(row("memcpy", memcpy, {MEMCPY: memcpy}, case=case, column=STALL))
        for what, saves, shows in (("copied late", late, "lazy"), ("copied at once", eager, "")):
            found = {name: np.array([one[name] for one in saves]) for name in (MEMCPY, STALL, STEP)}
            over = {MEMCPY: found[MEMCPY]}
            self._bench.rows(
                row(what, found[STALL], over, shows, case=case, column=STALL),
                row(what, found[STEP], over, case=case, column="the step after it"),
            )


def timed(what: str, way: Way, folder: Path, nbytes: int) -> Seconds:
    start = MPI.Wtime()
    way.save(folder)
    stall_s = MPI.Wtime() - start
    way.finish()
    COMM.Barrier()
    if COMM.rank == 0:
        sync(folder)
        if size_of(folder) < nbytes * 0.9:  # formats store different things in addition to tensors
            raise RuntimeError(f"{what} wrote {size_of(folder)} bytes instead of {nbytes}")
    return {f"{what} stall": stall_s, f"{what} on disk": MPI.Wtime() - start}


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


def clean(folder: Path) -> None:
    """Remove everything that the ways of a round have written. Collective."""
    COMM.Barrier()
    if COMM.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    COMM.Barrier()
