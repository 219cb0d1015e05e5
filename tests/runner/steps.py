"""Run the steps of the gate, or all steps, in lanes side by side, and add up what their tests reported.

Usage, in tests/: python -m runner.steps [--only STEP ...] gate|full

Steps begin in the order in which they are listed. Nothing but the first steps (lint, types, unit tests and what they
need) begins before all of these have passed; where one of them fails, the run ends at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.stacks import FAILED, LATE
from runner.tally import MAY_SKIP, NEVER_BEGUN, OTHER_RANKS, tally

REPO = Path(__file__).parents[2]
REPORTS = REPO / ".reports"
_LANES = {False: 2, True: 1}  # steps at a time: those that compute, those that wait for timers
_GRACE_S = 20  # from SIGTERM to SIGKILL
_SHOWN = 3  # failed tests that are named of a step that hung
_LINE_LENGTH = 200  # characters of a step's last line in the summary


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of make.

    Attributes:
        name: unique in its list.
        make: targets and variables, as in a shell.
        seconds: how long it takes beside others on two cores.
        after: steps that must have passed before, as a rule those that make environments.
        is_first: nothing but first steps begins before all of these have passed.
        waits: mostly for timers (Slurm's, TCP's).
        has_report: its tests are counted from its report; without a report it counts as one test.
    """

    name: str
    make: str
    seconds: float
    after: tuple[str, ...] = ("env",)
    is_first: bool = False
    waits: bool = False
    has_report: bool = True

    @property
    def limit(self) -> float:
        """Seconds after which it is ended and has failed: a busy machine is slow."""
        return 120 + 3 * self.seconds


def _environment(name: str, seconds: float, *after: str, is_first: bool = False) -> Step:
    folder = name.replace("env", ".venv")
    stamp = ".tests" if name == "env-lint" else ".installed"
    return Step(name, f"{folder}/{stamp}", seconds, after, is_first=is_first, has_report=False)


def _gate(name: str, seconds: float, *after: str, waits: bool = False) -> Step:
    """The tests of a folder that are marked for the gate."""
    return Step(name, f"{name} MARK=gate", seconds, after or ("env",), waits=waits)


def _first(unit: str) -> tuple[Step, ...]:
    return (
        Step("packages", ".venv/.tests", 75, (), is_first=True, has_report=False),
        _environment("env-lint", 11, is_first=True),
        Step("lint", "lint", 3, ("env-lint",), is_first=True, has_report=False),
        Step("wheel", ".venv-build/.wheel", 6, (), is_first=True, has_report=False),
        Step("docs", "docs", 60, ("wheel",), is_first=True, has_report=False),
        _environment("env", 5, "packages", "wheel", is_first=True),
        Step("unit", unit, 90, is_first=True),
        Step("type", "type", 20, ("env", "env-lint"), is_first=True, has_report=False),
    )


GATE = (
    *_first("unit MARK='not slow'"),
    # What waits.
    _gate("slurm", 60, waits=True),
    _gate("cluster", 80, waits=True),
    # What computes.
    _environment("env-transformers", 50, "env"),
    Step("simulation", "simulation", 190),
    _gate("faults", 240),
    _environment("env-lightning", 25, "env"),
    _gate("nemo", 80, "env-transformers", "env-lightning"),
    _gate("megatron", 60),
    Step("test-4-process", "test-4 COURIER=process TRANSPORT=p2p", 110),
    _gate("torchtitan", 40, "env-transformers"),
    _gate("transformers", 40, "env-transformers"),
    _gate("deepspeed", 40, "env-transformers"),
    _gate("lightning", 40, "env-lightning"),
    _gate("adapters", 60, "env-transformers"),
    _gate("programs", 120),
    Step("test-3", "test-3 TRANSPORT=rma", 70),
    _gate("package", 60),
    Step("demo", "demo", 40, has_report=False),
    Step("test-1", "test-1 TRANSPORT=p2p", 40),
)
FULL = (
    *_first("unit"),
    _environment("env-openmpi", 10, "env"),
    _environment("env-transformers", 50, "env"),
    _environment("env-lightning", 25, "env"),
    _environment("env-megatron", 10, "env"),
    _environment("env-files", 40, "env-transformers"),
    # What waits.
    Step("slurm", "slurm", 1000, waits=True),
    Step("cluster", "cluster", 1200, waits=True),
    Step("openmpi-cluster", "MPI=openmpi cluster", 400, ("env-openmpi",), waits=True),
    # What computes.
    Step("faults", "faults", 1200),
    Step("faults-thread", "faults COURIER=thread MARK=gate", 240),
    Step("openmpi-faults", "MPI=openmpi faults MARK=gate", 300, ("env-openmpi",)),
    Step("simulation", "simulation", 190),
    Step("simulate", "simulate SEEDS=0:30000", 610, has_report=False),
    Step("programs", "programs", 500, ("env-openmpi",)),  # one of them runs couriers of MPICH under Open MPI's launcher
    Step("nemo", "nemo", 500, ("env-transformers", "env-lightning")),
    Step("megatron", "megatron", 400, ("env-megatron",)),
    Step("deepspeed", "deepspeed", 180, ("env-transformers",)),
    Step("torchtitan", "torchtitan", 200, ("env-transformers",)),
    Step("lightning", "lightning", 280, ("env-lightning",)),
    Step("transformers", "transformers", 240, ("env-transformers",)),
    Step("package", "package", 450),
    Step("test-1", "test-1 TRANSPORT=p2p", 40),
    Step("test-8", "test-8", 80),
    # Each number of ranks has both transports and both kinds of couriers.
    *(Step(f"test-{ranks}", f"test-{ranks} TRANSPORT=rma", 80) for ranks in (2, 3, 4, 5)),
    *(Step(f"test-{ranks}-process", f"test-{ranks} COURIER=process TRANSPORT=p2p", 150) for ranks in (2, 3, 4, 5)),
    *(Step(f"openmpi-test-{ranks}", f"MPI=openmpi test-{ranks} TRANSPORT={transport}", 150, ("env-openmpi",))
      for ranks, transport in ((3, "rma"), (4, "p2p"), (5, "rma"))),
    Step("adapters", "adapters", 250, ("env-files",)),
    Step("openmpi-adapters", "MPI=openmpi adapters", 150, ("env-openmpi",)),
    Step("files", "files", 80, ("env-files",)),
    Step("browser", "browser", 75, ("env", "docs")),
    Step("chaos", "chaos SEED=1 MINUTES=1", 90, has_report=False),
    Step("chaos-parity", "chaos SEED=2 MINUTES=0.5 CHAOS='--redundancy rs:2+2'", 60, has_report=False),
    Step("chaos-openmpi", "MPI=openmpi chaos SEED=3 MINUTES=0.5 CHAOS='--transport rma --ranks-per-node 2'", 60,
         ("env-openmpi",), has_report=False),
    Step("bench", "bench BENCH=--quick", 300, ("env-megatron",), has_report=False),  # whether each works; no figures
    Step("demo", "demo", 40, has_report=False),
)  # fmt: skip


class Run:
    """Steps that are left, that run, and that have ended. A lane is a thread that takes the next step that may begin.

    Args:
        steps: a step comes after those that it waits for.
    """

    def __init__(self, steps: Sequence[Step]):
        self._left = list(steps)
        self._names = {step.name for step in steps}
        self._first = {step.name for step in steps if step.is_first}
        self._running: dict[Step, int] = {}  # by the group of its processes
        self._changed = threading.Condition()
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self.failed: dict[str, str] = {}  # step -> how it ended

    def all(self) -> None:
        """Run them. Steps that wait for a failed one never begin, and have failed."""
        lanes = [threading.Thread(target=self._lane, args=(waits,), daemon=True)
                 for waits, count in _LANES.items() for _ in range(count)]  # fmt: skip
        try:
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        finally:
            with self._changed:
                self._left.clear()
            self._end_all()
            for lane in lanes:
                lane.join(2 * _GRACE_S)

    def _lane(self, waits: bool) -> None:
        for step in self._due(waits):
            ended, log = self._do(step)
            with self._changed:
                del self._running[step]
                if ended != "exit 0":
                    self._fail(step, f"{ended} after {self.wall_s[step.name]:.0f} s; {_why(log, ended)}")
                print(
                    f"=== {step.name}\n{log}\n=== {step.name}: {ended} after {self.wall_s[step.name]:.0f} s", flush=True
                )
                self._changed.notify_all()

    def _due(self, waits: bool) -> Iterator[Step]:
        """Give the next step of a lane as soon as it may begin, until none is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next(waits) or not any(step.waits == waits for step in self._left))
                step = self._next(waits)
                if step is None:
                    return
                self._left.remove(step)
                print(f"--- {step.name}: make {step.make}", flush=True)
                self._running[step] = 0
            yield step

    def _next(self, waits: bool) -> Step | None:
        passed = self.wall_s.keys() - self.failed.keys()
        return next((step for step in self._left if step.waits == waits and self._needs(step) <= passed), None)

    def _needs(self, step: Step) -> set[str]:
        return {*step.after} & self._names | (set() if step.is_first else self._first)

    def _do(self, step: Step) -> tuple[str, str]:
        """Run a step to its end; how it ended, and what it printed."""
        path, start = REPORTS / f"{step.name}.log", time.monotonic()
        with path.open("wb") as log:
            process = subprocess.Popen(["make", "--no-print-directory", *shlex.split(step.make)], cwd=REPO, stdout=log,
                                       stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)  # fmt: skip
        self._running[step] = process.pid
        timers = [threading.Timer(step.limit + more, _signal, (process.pid, number))
                  for more, number in ((0, signal.SIGTERM), (_GRACE_S, signal.SIGKILL))]  # fmt: skip
        for timer in timers:
            timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        for timer in timers:
            timer.cancel()
        _signal(process.pid, signal.SIGKILL)  # what it has left
        wall_s = time.monotonic() - start
        self.cpu_s[step.name] = usage.ru_utime + usage.ru_stime
        self.wall_s[step.name] = wall_s
        ended = "ended at its limit" if wall_s > step.limit else f"exit {process.returncode}"
        return ended, path.read_text(errors="replace").rstrip()

    def _fail(self, step: Step, how: str) -> None:
        """Note a failure, drop the steps that wait for it, and end the run where it is a first step."""
        self.failed[step.name] = how
        for other in list(self._left):
            if self._needs(other) & self.failed.keys() or step.is_first:
                self._left.remove(other)
                self.failed[other.name] = NEVER_BEGUN
        if step.is_first:
            self._end_all()

    def _end_all(self) -> None:
        for group in list(self._running.values()):
            _signal(group, signal.SIGTERM)


def _signal(group: int, number: int) -> None:
    """Send a signal to a group of processes, if there is one."""
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def _why(log: str, ended: str) -> str:
    """What the log of a failed step says in a line: of one that hung, the tests that failed and that it hung in."""
    lines = log.splitlines() or ["nothing"]
    hung = [line for line in lines if line.startswith(FAILED)][:_SHOWN]
    hung += [line for line in lines if line.endswith(LATE)][-1:]
    return "; ".join(hung) if hung and not ended.startswith("exit") else f"its last line: {lines[-1][-_LINE_LENGTH:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gate", "full"])
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, in the environments that are there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs is ended, too
    steps = [step for step in (GATE if args.what == "gate" else FULL) if not args.only or step.name in args.only]
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    start, run = time.monotonic(), Run(steps)
    run.all()
    print("\nThe steps, by the CPU seconds they took, and by the seconds of a clock:")
    for name, cpu_s in sorted(run.cpu_s.items(), key=lambda item: -item[1]):
        print(f"{cpu_s:7.0f} {run.wall_s[name]:7.0f}  {name}{'  FAILED' if name in run.failed else ''}")
    print(f"{sum(run.cpu_s.values()):7.0f} {time.monotonic() - start:7.0f}  all")
    uncounted = [step for step in steps if not step.has_report and step.name not in run.failed]
    may_skip = MAY_SKIP + OTHER_RANKS if args.what == "gate" else MAY_SKIP
    return tally(REPORTS, run.failed, len(uncounted), may_skip)


if __name__ == "__main__":
    sys.exit(main())
