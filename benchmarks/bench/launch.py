"""Starts the ranks of a benchmark on this machine, and stops them."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mlflash.errors import LaunchFailed
from mlflash.run.processes import ask_within, mpiexec

Lines = list[dict[str, Any]]

KILL_S = 5.0  # between SIGTERM and SIGKILL
HOME = Path(__file__).parents[1]
ON_NODE = HOME.parent / "tests" / "support" / "on_node.py"  # gives each rank its emulated node


class Part(NamedTuple):
    """One launch.

    Attributes:
        ranks: number of ranks.
        measure: the function that each rank calls with a `Bench` and the arguments.
        arguments: keyword arguments that can be written as JSON.
        per_node: ranks on each emulated node.
        python: the Python that runs the ranks.
    """

    ranks: int
    measure: Callable[..., None]
    arguments: Mapping[str, Any] = {}
    per_node: int = 1
    python: str = sys.executable


def launch(part: Part, repetitions: int, timeout_s: float) -> tuple[str, Lines]:
    """Run the ranks of a part on emulated nodes, and kill them after ``timeout_s``.

    Returns:
        What went wrong ("" if nothing did), and the lines that the ranks wrote.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlflash-bench-") as memory:
        out = Path(memory, "out.jsonl")
        argv, variables = command_of(part, repetitions, out, memory)
        variables |= {"RANKS_PER_NODE": str(part.per_node), "MLFLASH_MEMORY": memory, "TMPDIR": memory}
        command, variables = mpiexec(part.ranks, [part.python, str(ON_NODE), *argv], variables)
        previous = signal.signal(signal.SIGTERM, _end)  # otherwise ranks and files in memory would stay behind
        try:
            why = run_until(command, timeout_s, KILL_S, env=variables)
        finally:
            signal.signal(signal.SIGTERM, previous)
        return f"{part.measure.__name__} on {part.ranks} ranks {why}" if why else "", lines_of(out)


def command_of(part: Part, repetitions: int, out: Path, memory: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of a rank and its environment. With -m mpi4py an exception on one rank ends all ranks."""
    file = str(Path(inspect.getfile(part.measure)).resolve())
    call = [file, part.measure.__name__, str(repetitions), json.dumps(part.arguments)]
    argv = [part.python, "-m", "mpi4py", str(HOME / "bench" / "rank.py"), str(out), memory, *call]
    path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
    return argv, {"PYTHONWARNINGS": "error", "PYTHONPATH": path}


def run_until(command: Sequence[str], timeout_s: float, kill_s: float, **options: Any) -> str:
    """Run a program. End it and its session when its time is over or this process is interrupted.

    From SIGTERM, which mpiexec forwards to ranks in other sessions, to SIGKILL it takes ``kill_s``. The options are
    those of `subprocess.Popen`.

    Returns:
        What went wrong ("" if nothing did).
    """
    try:
        done = ask_within(command, timeout_s, kill_s, **{"stdout": None, "stderr": None, **options})
    except LaunchFailed as error:
        return error.message
    output = f": {done.stderr[-2000:]}" if done.stderr else ""
    return f"ended with exit status {done.returncode}{output}" if done.returncode else ""


def lines_of(out: Path) -> Lines:
    """Read the lines of JSON that ranks wrote to a file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
