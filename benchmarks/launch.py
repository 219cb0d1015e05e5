"""Start the ranks of a benchmark on this machine, and stop them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlflash.demo.launch import mpiexec

KILL_S = 5.0  # between SIGTERM and SIGKILL


def launch(ranks: int, script: Path, arguments: list[str], timeout_s: float) -> tuple[str, list[dict[str, Any]]]:
    """Run a script on emulated nodes of one rank each.

    Args:
        ranks: how many.
        script: what they run; its first argument is a file that they write lines of JSON to, its second a directory in
            memory for all they make there, which goes with them.
        arguments: the others.
        timeout_s: they are killed after so many seconds.

    Returns:
        What went wrong ("": nothing), and the lines they wrote.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlflash-bench-") as memory:
        out = Path(memory, "out.jsonl")
        # With -m mpi4py an exception on one rank ends the others too.
        argv = [sys.executable, "-m", "mpi4py", str(script), str(out), memory, *arguments]
        env = {"MLFLASH_RANKS_PER_NODE": "1", "PYTHONWARNINGS": "error", "TMPDIR": memory}
        command, env = mpiexec(ranks, argv, env)
        running = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            status = running.wait(timeout_s)
            ended = f"the ranks ended with exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            ended = f"not done after {timeout_s:g} s"
        finally:
            _stop(running)
        return ended, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def keep(path: Path | None, header: dict[str, Any], rows: list[dict[str, Any]], ended: str) -> int:
    """Write the numbers to a file, if one is wanted, and say what went wrong; returns the exit status."""
    if path is not None:
        path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    if ended:
        print(f"{Path(sys.argv[0]).stem}: {ended}; the table ends where the ranks did", file=sys.stderr)
    return 1 if ended else 0


def _stop(running: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # mpiexec hands SIGTERM on to ranks of other sessions
        if running.poll() is None:
            os.killpg(running.pid, number)
            try:
                running.wait(KILL_S)
            except subprocess.TimeoutExpired:
                pass
