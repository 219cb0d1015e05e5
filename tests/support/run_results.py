"""What the ranks of `run_worker.py`, and `mlflash run`, leave in a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import PlainRanks
from waiting import PATIENCE_S, until

from mlflash.run.processes import signal_group, spawn

WORKER = Path(__file__).with_name("run_worker.py")


class Results:
    def __init__(self, out: Path):
        self.out = out
        out.mkdir(exist_ok=True)

    def ends(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("end*"))]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.out / "run.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def log(self) -> str:
        raise NotImplementedError

    def wait_for_step(self, step: int, timeout: float = PATIENCE_S) -> None:
        until(lambda: self._step() >= step, lambda: f"step {step}:\n{self.log()}", timeout)

    def _step(self) -> int:
        try:
            return int((self.out / "step0").read_text())
        except (FileNotFoundError, ValueError):  # not yet, or it is being written
            return -1


class Launched(Results):
    """A run that was started with this command. Close it."""

    def __init__(self, out: Path, command: Sequence[str], env: Mapping[str, str]):
        super().__init__(out)
        self._log = (out / "log").open("w")
        self._process = spawn(command, stdout=self._log, stderr=self._log, env=env)

    def log(self) -> str:
        return (self.out / "log").read_text()[-20_000:]

    def wait(self, timeout: float = 90) -> int:
        try:
            code: int = self._process.wait(timeout)
            return code
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {timeout} s:\n{self.log()}") from None

    def close(self) -> None:
        if self._process.poll() is None:
            signal_group(self._process, signal.SIGKILL)
            self._process.wait(30)
        self._log.close()


def uninterrupted(out: Path, ranks: int, last: int) -> list[str]:
    """Train without any trouble; returns the digest of the final state of each rank."""
    words = [sys.executable, str(WORKER), str(out / "pfs"), str(out), str(last)]
    env = {**os.environ, "MLFLASH_MEMORY": str(out), "MLFLASH_REDUNDANCY": "none"}
    with PlainRanks(out, ranks, words, env) as started:
        assert started.wait() == [0] * ranks, started.log
    return [end["digest"] for end in Results(out).ends()]
