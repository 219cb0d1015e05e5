"""Runs seeds, each in a forked process: it begins like all others, and ends without a trace."""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import selectors
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import machine
import threads
from history import History
from scheduler import NEVER

Result = dict[str, Any]
LIMIT_S = 120.0  # real seconds of a seed
now = threads.REAL_TIME["monotonic"]


def run(seed: int, fixed: Mapping[str, object], until_points: float = NEVER, keeps_trace: bool = False) -> Result:
    """Run a seed in this process. What became of it is plain data.

    Args:
        fixed: fields of `faults.Setting` that are given.
        until_points: see `History`.
    """
    gc.disable()  # what is collected when must not decide anything
    started = time.process_time()
    history = History(seed, dict(fixed), keeps_trace, until_points)
    try:
        history.run()
    except Exception as error:  # a mistake of the simulation
        history.problems.append("the simulator failed: " + "".join(traceback.format_exception(error))[-3000:])
    kernel = history.kernel
    return {
        "seed": seed, "problems": history.problems, "digest": kernel.digest.hexdigest(), "points": kernel.points,
        "seconds": kernel.now, "cpu_s": time.process_time() - started, "outcomes": history.outcomes,
        "reached": history.reached, "kills": history.kills, "setting": str(history.setting),
        "trace": "\n".join(kernel.trace or ()),
    }  # fmt: skip


def warm_up() -> None:
    """Import and cache what the first seed would, so that all seeds begin alike."""
    for special in ("drain", "lazy", "elastic", "values"):
        for courier in ("thread", "process"):
            run(3, {"launches": 1, "special": frozenset({special}), "courier": courier})
    gc.enable()
    gc.collect()
    gc.freeze()


Make = functools.partial[Result]
"""What makes a result; its first argument says which."""


class _Child:
    """A process that makes one result. Shortly before its time is over, it prints where it is."""

    def __init__(self, make: Make):
        self.end, self.output, self._name = now() + LIMIT_S, b"", make.args[0]
        self.out, into = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.out)
            faulthandler.dump_traceback_later(0.95 * LIMIT_S)
            try:
                text = json.dumps(make())
            except BaseException as error:
                text = json.dumps({"problems": ["".join(traceback.format_exception(error))[-3000:]]})
            with os.fdopen(into, "w") as pipe:
                pipe.write(text)
            machine.exit_now(0)
        os.close(into)

    def read(self) -> bool:
        part = os.read(self.out, 1 << 20)
        self.output += part
        return not part

    def finish(self) -> Result:
        os.close(self.out)
        os.waitpid(self.pid, 0)
        shutil.rmtree(Path(f"/dev/shm/simulation-{self.pid}"), ignore_errors=True)
        try:
            result: Result = json.loads(self.output)
        except ValueError:
            result = {"seed": self._name, "problems": [f"the process of this seed died, or took over {LIMIT_S:g} s"]}
        return result


def seeds(numbers: Iterable[int], fixed: Mapping[str, object], until_points: float = NEVER, keeps_trace: bool = False
          ) -> Iterator[Make]:  # fmt: skip
    """What makes the results of some seeds; see `run`."""
    return (functools.partial(run, number, fixed, until_points, keeps_trace) for number in numbers)


def run_all(makes: Iterable[Make], jobs: int = 1, end: float = NEVER) -> Iterator[Result]:
    """Make results side by side, each in a process of its own; yield each when it is there.

    Args:
        end: by the real time.monotonic; none is begun after it.
    """
    selector, waiting = selectors.DefaultSelector(), iter(makes)
    running: set[_Child] = set()
    try:
        while True:
            while len(running) < jobs and now() < end and (make := next(waiting, None)) is not None:
                child = _Child(make)
                running.add(child)
                selector.register(child.out, selectors.EVENT_READ, child)
            if not running:
                return
            selector.select(timeout=max(0.0, min(child.end for child in running) - now()))
            for child in [child for child in running if now() > child.end or (_is_readable(child) and child.read())]:
                if now() > child.end:
                    os.kill(child.pid, signal.SIGKILL)
                selector.unregister(child.out)
                running.discard(child)
                yield child.finish()
    finally:
        for child in running:
            os.kill(child.pid, signal.SIGKILL)
            child.finish()
        selector.close()


def _is_readable(child: _Child) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(child.out, selectors.EVENT_READ)
        return bool(selector.select(0))


def shortest(result: Result, fixed: Mapping[str, object]) -> int:
    """The smallest number of scheduling points after which no more faults are needed for a seed to fail."""
    low, high = 0, int(result["points"])
    while low < high:
        middle = (low + high) // 2
        (tried,) = run_all(seeds([result["seed"]], fixed, until_points=middle))
        low, high = (low, middle) if tried["problems"] else (middle + 1, high)
    return high


class Summary:
    def __init__(self) -> None:
        self.seeds = self.points = 0
        self.cpu_s = 0.0
        self.outcomes, self.reached, self.kills = Counter[str](), Counter[str](), Counter[str]()
        self.failed: list[Result] = []

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.points += result.get("points", 0)
        self.cpu_s += result.get("cpu_s", 0.0)
        for total, name in ((self.outcomes, "outcomes"), (self.reached, "reached"), (self.kills, "kills")):
            total.update(result.get(name, {}))
        if result["problems"]:
            self.failed.append(result)
