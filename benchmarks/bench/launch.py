"""Start the ranks of a benchmark on this machine, and stop them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from mlflash.demo.launch import mpiexec

KILL_S = 5.0  # between SIGTERM and SIGKILL
HOME = Path(__file__).parents[1]


def launch(
    ranks: int, script: Path, arguments: list[str], timeout_s: float, per_node: int = 1
) -> tuple[str, list[dict[str, Any]]]:
    """Run a script on emulated nodes.

    Args:
        ranks: how many.
        script: what they run; its first argument is a file that they write lines of JSON to, its second a directory in
            memory for all they make there, which goes with them.
        arguments: the others.
        timeout_s: they are killed after so many seconds.
        per_node: ranks on each node.

    Returns:
        What went wrong ("": nothing), and the lines they wrote.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlflash-bench-") as memory:
        out = Path(memory, "out.jsonl")
        # With -m mpi4py an exception on one rank ends the others too.
        argv = [sys.executable, "-m", "mpi4py", str(script), str(out), memory, *arguments]
        path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
        env = {"MLFLASH_RANKS_PER_NODE": str(per_node), "PYTHONWARNINGS": "error", "TMPDIR": memory, "PYTHONPATH": path}
        command, env = mpiexec(ranks, argv, env)
        before = signal.signal(signal.SIGTERM, _end)  # else ranks and memory would stay behind
        running = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            status = running.wait(timeout_s)
            ended = f"{script.parent.name}/{script.name} ended with exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            ended = f"{script.parent.name}/{script.name} was not done after {timeout_s:g} s"
        finally:
            _stop(running)
            signal.signal(signal.SIGTERM, before)
        return ended, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _stop(running: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # mpiexec hands SIGTERM on to ranks of other sessions
        if running.poll() is None:
            os.killpg(running.pid, number)
            try:
                running.wait(KILL_S)
            except subprocess.TimeoutExpired:
                pass
