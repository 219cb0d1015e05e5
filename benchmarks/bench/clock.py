"""Times actions that run on all ranks at once. The time of an action is its time on the slowest rank.

A repetition runs its actions one after the other, including the yardsticks. Ratios are made within a repetition, so
that a temporary load affects both times alike. The tables show the median of the ratios.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mlflash import Checkpointer

from .rows import Row, Samples

Seconds = Mapping[str, float]
Action = Callable[[], Seconds | None]  # returns further seconds by name

WARM_UP = 2
TIMEOUT_S = 120.0


class Bench:
    """Times actions on all ranks and writes the results to a file.

    Args:
        comm: all ranks.
        out: the file. Rank 0 appends lines of JSON to it.
        memory: a directory in memory.
        repetitions: number of repetitions. The median counts.
        warm_up: number of further repetitions before these, which do not count.
    """

    def __init__(self, comm: MPI.Intracomm, out: Path, memory: Path, repetitions: int, warm_up: int = WARM_UP):
        self.comm, self.memory, self.repetitions, self.warm_up = comm, memory, repetitions, warm_up
        self._out = out
        self._cpu_clocks = [time.CLOCK_PROCESS_CPUTIME_ID]

    def header(self, **more: Any) -> None:
        """Write a header about this machine and its software."""
        name, version = MPI.get_vendor()
        self.write({"mpi": f"{name} {'.'.join(map(str, version))}", **more})

    def rows(self, *rows: Row) -> None:
        """Write rows of tables."""
        for row in rows:
            self.write(row)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line of any form."""
        if self.comm.rank == 0:
            with self._out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def repeat(self, actions: Mapping[str, Action], before: Callable[[], object] = lambda: None) -> Samples:
        """Time all actions, one after the other, in each repetition. Collective.

        Args:
            actions: the actions, by name.
            before: called before each repetition. It is not timed.

        Returns:
            Seconds of the slowest rank by name, shape ``(repetitions,)``, and CPU seconds by name + " CPU", which
            contain those of the courier.
        """
        rounds = list[dict[str, float]]()
        for _ in range(self.warm_up + self.repetitions):
            before()
            seconds: dict[str, float] = {}
            for name, action in actions.items():
                seconds |= self._timed(name, action)
            rounds.append(slowest(self.comm, seconds))
        return {name: np.array([seconds[name] for seconds in rounds[self.warm_up :]]) for name in rounds[0]}

    def _timed(self, name: str, action: Action) -> dict[str, float]:
        self.comm.Barrier()
        start, cpu_start = time.perf_counter(), self._cpu_s()
        more = action()
        wall_s, cpu_s = time.perf_counter() - start, self._cpu_s() - cpu_start
        return {name: wall_s, f"{name} CPU": cpu_s, **(more or {})}

    def _cpu_s(self) -> float:
        return sum(map(time.clock_gettime, self._cpu_clocks))

    @contextlib.contextmanager
    def job(self, name: str) -> Iterator[str]:
        """Yield a unique job name. Afterward remove what the job left in memory. Collective."""
        yield name
        self.comm.Barrier()
        if self.comm.rank == 0:
            for path in self.memory.glob(f"node*/mlflash-{os.getuid()}/{name}"):
                shutil.rmtree(path)
        self.comm.Barrier()

    def directory_of(self, job: str) -> Path:
        return Path(os.environ["MLFLASH_MEMORY"], f"mlflash-{os.getuid()}", job)

    def checkpointer(self, job: str, **settings: Any) -> Checkpointer:
        """Make a Checkpointer that raises the errors of saves. Collective."""
        settings = {"strict": True, "timeout_s": TIMEOUT_S, **settings}
        made = Checkpointer(job=job, comm=self.comm, **settings)
        (pid,) = re.findall(r"pid (\d+)", made.report()["courier"])
        self._cpu_clocks[1:] = [~int(pid) << 3 | 2]  # as clock_getcpuclockid of Linux makes it
        return made


def slowest(comm: MPI.Comm, seconds: Seconds) -> dict[str, float]:
    """Return the maximum of each number over all ranks. Collective."""
    most = np.empty(len(seconds))
    comm.Allreduce(np.array(list(seconds.values())), most, MPI.MAX)
    return dict(zip(seconds, most.tolist(), strict=True))


def cpu(samples: Samples) -> Samples:
    """Return the CPU seconds, under the same names as the seconds."""
    return {name.removesuffix(" CPU"): values for name, values in samples.items() if name.endswith(" CPU")}
