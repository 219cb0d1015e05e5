"""Trainers forked from a process that has imported everything: a launch costs a third of what `python` would take.

Each is a process of its own, in a session of its own, with its own environment, and starts couriers as any trainer
does. `Trainers` is the side of the test; this file run as a program is the process that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import waiting
from waiting import until

_PR_SET_PDEATHSIG = 1


class Trainers:
    """Forks trainers from a process that has imported modules in an environment. Close it: all trainers are killed."""

    def __init__(self, modules: Sequence[str], log: Path, environment: Mapping[str, str]):
        self._log = log
        self._pids: list[int] = []
        paths = [str(Path(waiting.__file__).parent), os.environ.get("PYTHONPATH", "")]
        with log.open("ab") as output:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-W", "error", __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=output, text=True, start_new_session=True,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )  # fmt: skip

    def start(self, script: Path, argument: str, environment: Mapping[str, str], log: Path) -> int:
        """Start a script with its only argument in a process of its own; gives the process number."""
        order = {"words": [str(script), argument], "environment": {**environment}, "log": str(log)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks trainers has ended: {self._log.read_text()}"
        self._pids.append(int(answer))
        return self._pids[-1]

    def run(self, pid: int) -> bool:
        """Whether a trainer has not ended. There are no zombies, and another process may have its number later."""
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == self._process.pid
        except (FileNotFoundError, ProcessLookupError):
            return False

    def end(self, pids: Sequence[int]) -> None:
        for pid in filter(self.run, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(self.run, pids)), "the end of the trainers that were killed")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self.end(self._pids)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()


def _orders() -> dict[str, Any]:
    """Fork what is asked for; gives the order in the child that it is for. It ends with its input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return order
        print(pid, flush=True)
    sys.exit()


def _become(order: dict[str, Any]) -> None:
    """Be a trainer that was started with these words, this environment and this log."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the process that forks, if the test is killed
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing, log = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
    )
    for number, stream in enumerate((nothing, log, log)):
        os.dup2(stream, number)
    os.closerange(3, max(nothing, log) + 1)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["words"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        __import__(module)
    _become(_orders())
    runpy.run_path(sys.argv[0], run_name="__main__")
