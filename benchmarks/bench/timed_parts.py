"""Times the parts of a save in this process: seconds of each function without those that it calls of the others."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

OUT = "PROFILED_PARTS"  # the file to which a courier appends a line for each save

Part = tuple[str, Any, str]  # its name, and the function: what has it, and its name there


class TimedParts:
    """Seconds of parts, of the thread that calls them: ``wall`` and ``cpu``, by name."""

    def __init__(self, parts: Iterable[Part]):
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._open = threading.local()
        for name, holder, function in parts:
            self.wall[name] = self.cpu[name] = 0.0
            setattr(holder, function, self._timed(name, getattr(holder, function)))

    def take(self) -> dict[str, tuple[float, float]]:
        """Return wall and CPU seconds by part, and begin anew."""
        taken = {name: (self.wall[name], self.cpu[name]) for name in self.wall}
        for name in taken:
            self.wall[name] = self.cpu[name] = 0.0
        return taken

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            outer, self._open.name = getattr(self._open, "name", None), name
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **options)
            finally:
                wall_s, cpu_s = time.perf_counter() - wall, time.thread_time() - cpu
                self._open.name = outer
                for part, sign in ((name, 1), (outer, -1)):
                    if part is not None:
                        self.wall[part] += sign * wall_s
                        self.cpu[part] += sign * cpu_s

        return timed


def of_trainer() -> list[Part]:
    from mlflash import Checkpointer
    from mlflash.channel.client import Client
    from mlflash.memory.own_slots import OwnSlots
    from mlflash.save.save_queue import SaveQueue
    from mlflash.save.stage import CopyPlan
    from mlflash.state.flatten import Flattener

    return [
        ("the rest of `save`", Checkpointer, "save"),
        ("take the state apart", Flattener, "flatten"),
        ("lay it out", SaveQueue, "plan"),
        ("lease slots of the courier", OwnSlots, "take"),
        ("copy, and make checksums", CopyPlan, "copy"),
        ("post the save", Client, "post"),
        ("wait until the courier has it", Client, "wait_sent"),
    ]


def of_courier() -> list[Part]:
    from mlflash.commit import commit
    from mlflash.mpi.world import World
    from mlflash.protect import transfer
    from mlflash.protect.value_checks import Examination

    return [
        ("the rest of the commit", commit, "bring_to_end"),
        ("announce the save to all ranks", commit, "_announce"),
        ("send and receive, and wait for it", World, "drive"),
        ("make checksums that are missing", transfer.Source, "check_up_to"),
        ("check values of some blocks", Examination, "examine"),
        ("check what arrives", transfer, "checks_of"),
        ("agree on the commit", World, "least_or_raise"),
    ]


def run(forked: Any) -> None:
    """Be a courier whose parts are timed: the entry point of the forked process."""
    from mlflash.commit import commit
    from mlflash.courier import main as courier_main

    parts, out = TimedParts(of_courier()), Path(f"{os.environ[OUT]}-{forked.rank}")
    timed = commit.bring_to_end

    def bring_to_end(*args: Any) -> None:
        parts.take()
        timed(*args)
        with out.open("a") as file:
            file.write(json.dumps(parts.take()) + "\n")

    commit.bring_to_end = bring_to_end
    courier_main.run(forked)
