"""Starts the ranks of a benchmark on this machine, and stops them."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mlflash.errors import LaunchFailed
from mlflash.launcher.processes import ask_within, mpiexec

Lines = list[dict[str, Any]]

KILL_S = 5.0  # between SIGTERM and SIGKILL
HOME = Path(__file__).parents[1]


def launch(ranks: int, script: Path, arguments: list[str], timeout_s: float, per_node: int = 1,
           environment: Mapping[str, str] | None = None, python: str = sys.executable
           ) -> tuple[str, Lines]:  # fmt: skip
    """Run a script on emulated nodes.

    Args:
        ranks: number of ranks.
        script: the program of a rank. Its first argument is a file to which the ranks write lines of JSON. Its second
            argument is a directory in memory for all their files, which is removed afterward.
        arguments: further arguments.
        timeout_s: seconds after which the ranks are killed.
        per_node: ranks on each node.
        environment: variables for MPI, in addition to the environment of this process.
        python: the Python of an environment that has the packages that the ranks need.

    Returns:
        What went wrong ("" if nothing did), and the lines that the ranks wrote.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlflash-bench-") as memory:
        out = Path(memory, "out.jsonl")
        argv, env = program(script, out, memory, arguments, python)
        command, env = mpiexec(
            ranks, argv, {**(environment or {}), **env, "MLFLASH_RANKS_PER_NODE": str(per_node), "TMPDIR": memory}
        )
        before = signal.signal(signal.SIGTERM, _end)  # otherwise ranks and files in memory would stay behind
        try:
            why = run_until(command, timeout_s, KILL_S, env=env)
        finally:
            signal.signal(signal.SIGTERM, before)
        return f"{script.parent.name}/{script.name} {why}" if why else "", lines_of(out)


def program(script: Path, out: Path, memory: str, arguments: Sequence[str], python: str = sys.executable
            ) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    """Return the command of a rank and its environment. With -m mpi4py an exception on one rank ends all ranks."""
    path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
    argv = [python, "-m", "mpi4py", str(script), str(out), memory, *arguments]
    return argv, {"PYTHONWARNINGS": "error", "PYTHONPATH": path}


def run_until(command: Sequence[str], timeout_s: float, kill_s: float, **options: Any) -> str:
    """Run a program. End it and its session when its time is over or this process is interrupted.

    Args:
        command: the command line.
        timeout_s: how long it may take.
        kill_s: seconds from SIGTERM to SIGKILL. mpiexec forwards the SIGTERM to ranks in other sessions.
        options: options of `subprocess.Popen`. With ``stderr=PIPE`` the result includes the end of its output.

    Returns:
        What went wrong ("" if nothing did).
    """
    try:
        done = ask_within(command, timeout_s, kill_s, **{"stdout": None, "stderr": None, **options})
    except LaunchFailed as error:
        return error.message
    said = f": {done.stderr[-2000:]}" if done.stderr else ""
    return f"ended with exit status {done.returncode}{said}" if done.returncode else ""


def lines_of(out: Path) -> Lines:
    """Read the lines of JSON that ranks wrote to a file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
