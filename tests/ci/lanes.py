"""Runs steps in lanes side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ci.stacks import FAILED, LATE
from ci.steps import Step
from ci.tally import NEVER_BEGUN

REPO = Path(__file__).parents[2]
REPORTS = REPO / ".reports"
_LANES = {False: 2, True: 1}  # steps at a time: those that compute, those that wait for timers
_GRACE_S = 20  # from SIGTERM to SIGKILL
_SHOWN = 3  # failed tests that are named of a step that hung
_LINE_LENGTH = 200  # characters of a step's last line that the summary has


@dataclasses.dataclass(frozen=True)
class End:
    """How a step ended.

    Attributes:
        how: in words.
        passed: whether it exited with 0.
        wall_s: seconds of a clock.
        cpu_s: seconds of all processes that it has waited for.
        printed: by it.
    """

    how: str
    passed: bool
    wall_s: float
    cpu_s: float
    printed: str

    @property
    def why(self) -> str:
        """Why it failed, in a line: of a step that hung, the tests that failed and the one that it hung in."""
        lines = self.printed.splitlines() or ["nothing"]
        hung = [line for line in lines if line.startswith(FAILED)][:_SHOWN]
        hung += [line for line in lines if line.endswith(LATE)][-1:]
        if not hung or self.how.startswith("exit"):
            hung = [f"its last line: {lines[-1][-_LINE_LENGTH:]}"]
        return f"{self.how} after {self.wall_s:.0f} s; {'; '.join(hung)}"


class Run:
    """Steps that are left, that run, and that have ended. A lane is a thread that takes the next step that may begin.

    Args:
        steps: a step comes after those that it waits for. Steps that it waits for and that are not here are ignored.
    """

    def __init__(self, steps: Sequence[Step]):
        self._left = list(steps)
        self._names = {step.name for step in steps}
        self._first = {step.name for step in steps if step.is_first}
        self._groups: dict[str, int] = {}  # of processes of the steps that run
        self._changed = threading.Condition()
        self.ended: dict[str, End] = {}
        self.failed: dict[str, str] = {}  # why

    def all(self) -> None:
        """Run them. Steps that wait for a failed one never begin, and have failed."""
        lanes = [threading.Thread(target=self._lane, args=(waits,), daemon=True)
                 for waits, count in _LANES.items() for _ in range(count)]  # fmt: skip
        try:
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        finally:  # of an interrupted run
            self._left.clear()
            for number in (signal.SIGTERM, signal.SIGKILL):
                self._signal_all(number)
                for lane in lanes:
                    lane.join(_GRACE_S if self._groups else 0)

    def _lane(self, waits: bool) -> None:
        for step in self._due(waits):
            end = self._run(step)
            with self._changed:
                self.ended[step.name] = end
                if not end.passed:
                    self._fail(step, end.why)
                print(
                    f"=== {step.name}\n{end.printed}\n=== {step.name}: {end.how} after {end.wall_s:.0f} s", flush=True
                )
                self._changed.notify_all()

    def _due(self, waits: bool) -> Iterator[Step]:
        """Give the next step of a lane as soon as it may begin, until none is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next(waits) or all(step.waits != waits for step in self._left))
                step = self._next(waits)
                if step is None:
                    return
                self._left.remove(step)
                print(f"--- {step.name}: make {step.make}", flush=True)
            yield step

    def _next(self, waits: bool) -> Step | None:
        passed = self.ended.keys() - self.failed.keys()
        return next((step for step in self._left if step.waits == waits and self._needs(step) <= passed), None)

    def _needs(self, step: Step) -> set[str]:
        return {*step.after} & self._names | (set() if step.is_first else self._first)

    def _run(self, step: Step) -> End:
        path, start = REPORTS / f"{step.name}.log", time.monotonic()
        with path.open("wb") as log:
            process = subprocess.Popen(["make", "--no-print-directory", *shlex.split(step.make)], cwd=REPO, stdout=log,
                                       stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)  # fmt: skip
        self._groups[step.name] = process.pid
        timers = [threading.Timer(step.limit + more, _signal, (process.pid, number))
                  for more, number in ((0, signal.SIGTERM), (_GRACE_S, signal.SIGKILL))]  # fmt: skip
        for timer in timers:
            timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        for timer in timers:
            timer.cancel()
        _signal(self._groups.pop(step.name), signal.SIGKILL)  # what the step has left
        wall_s = time.monotonic() - start
        how = f"exit {process.returncode}" if wall_s < step.limit else "ended at its limit"
        return End(how, how == "exit 0", wall_s, usage.ru_utime + usage.ru_stime,
                   path.read_text(errors="replace").rstrip())  # fmt: skip

    def _fail(self, step: Step, why: str) -> None:
        """Note why a step failed, and drop those that wait for it; after a first step, end the run."""
        self.failed[step.name] = why
        for other in list(self._left):
            if step.is_first or self._needs(other) & self.failed.keys():
                self._left.remove(other)
                self.failed[other.name] = NEVER_BEGUN
        if step.is_first:
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for group in list(self._groups.values()):
            _signal(group, number)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
