"""Runs seeds, each in a forked process: it begins like all others, and ends without a trace."""

from __future__ import annotations

import faulthandler
import functools
import gc
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any

import machine
import threads
from history import History
from scheduler import NEVER

Result = dict[str, Any]
FORK = get_context("fork")
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
        "cpu_s": time.process_time() - started, "outcomes": history.outcomes, "reached": history.reached,
        "setting": str(history.setting), "trace": "\n".join(kernel.trace or ()),
    }  # fmt: skip


def warm_up() -> None:
    """Import and cache what the first seed would, so that all seeds begin alike."""
    for special in ("drain", "lazy", "elastic", "values"):
        run(3, {"launches": 1, "special": frozenset({special})})
    gc.enable()
    gc.collect()
    gc.freeze()


Make = functools.partial[Result]
"""What makes a result; its first argument says which."""


def seeds(numbers: Iterable[int], fixed: Mapping[str, object], until_points: float = NEVER, keeps_trace: bool = False
          ) -> Iterator[Make]:  # fmt: skip
    """What makes the results of some seeds; see `run`."""
    return (functools.partial(run, number, fixed, until_points, keeps_trace) for number in numbers)


def run_all(makes: Iterable[Make], jobs: int = 1, end: float = NEVER) -> Iterator[Result]:
    """Make results side by side, each in a process of its own; yield each when it is there.

    Args:
        end: by the real time.monotonic; none is begun after it.
    """
    waiting = iter(makes)
    running: dict[Connection, tuple[Any, Any, float]] = {}
    try:
        while True:
            while len(running) < jobs and now() < end and (make := next(waiting, None)) is not None:
                answer, into = FORK.Pipe(duplex=False)
                process = FORK.Process(target=_answer, args=(make, into))
                process.start()
                into.close()
                running[answer] = process, make.args[0], now() + LIMIT_S
            if not running:
                return
            ready = connection.wait(running, max(0.0, min(due for *_, due in running.values()) - now()))
            for answer in ready or [answer for answer, (*_, due) in running.items() if now() > due]:
                process, name, _ = running.pop(answer)
                yield _received(answer, process, name)
    finally:
        for answer, (process, name, _) in running.items():
            _received(answer, process, name)


def _answer(make: Make, into: Connection) -> None:
    faulthandler.dump_traceback_later(0.95 * LIMIT_S)  # where it is, shortly before its time is over
    try:
        into.send(make())
    except BaseException as error:
        into.send({"problems": ["".join(traceback.format_exception(error))[-3000:]]})
    machine.exit_now(0)


def _received(answer: Connection, process: Any, name: object) -> Result:
    """What a process has answered, which ends then."""
    try:
        result: Result = answer.recv() if answer.poll() else {}
    except EOFError:
        result = {}
    process.kill()
    process.join()
    shutil.rmtree(machine.memory_of(process.pid), ignore_errors=True)
    return result or {"seed": name, "problems": [f"the process of this seed died, or took over {LIMIT_S:g} s"]}


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
        self.outcomes, self.reached = Counter[str](), Counter[str]()
        self.failed: list[Result] = []

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.points += result.get("points", 0)
        self.cpu_s += result.get("cpu_s", 0.0)
        self.outcomes.update(result.get("outcomes", {}))
        self.reached.update(result.get("reached", {}))
        if result["problems"]:
            self.failed.append(result)
