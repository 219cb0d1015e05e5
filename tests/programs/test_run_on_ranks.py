"""A program that uses MPI runs on ranks that no launcher of MPI has started, as `mlflash run` by ssh scavenges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import free_port, runs
from waiting import PATIENCE_S, until

PROGRAM = """
import os, pathlib, sys
from mpi4py import MPI
comm, (folder, code) = MPI.COMM_WORLD, sys.argv[1:]
if code == "wait":
    pathlib.Path(folder, f"new{comm.rank}").write_text(str(os.getpid()))
    os.rename(f"{folder}/new{comm.rank}", f"{folder}/pid{comm.rank}")
    comm.recv()
total = comm.allreduce(comm.rank + 1)
print(f"{comm.rank} of {comm.size}: {total}", flush=True)
if code == "raise":
    raise ValueError("no")
sys.exit(int(code))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts ranks that know each other as torchrun's do."""
    (tmp_path / "the_program.py").write_text(PROGRAM)
    with ExitStack() as over:

        def begin(ranks: int, code: str) -> list[subprocess.Popen[str]]:
            paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
            names = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(free_port()), "PYTHONPATH": paths}  # fmt: skip
            module = "mlflash.tools.run_on_ranks"
            words = [sys.executable, "-m", module, "-m", "the_program", str(tmp_path), code]
            started = []
            for rank in range(ranks):
                environment = {**os.environ, **names, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(
                    words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
                started.append(over.enter_context(process))
                over.callback(process.kill)
            return started

        yield begin


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("3", 3), ("raise", 1)])
def test_it_has_a_world_of_all_ranks_and_its_exit_code_comes_through(
    start: Any, ranks: int, code: str, expected: int
) -> None:
    said = [(process.communicate(timeout=PATIENCE_S), process.returncode) for process in start(ranks, code)]
    total = ranks * (ranks + 1) // 2
    for rank, ((out, err), returned) in enumerate(said):
        assert (out, returned) == (f"{rank} of {ranks}: {total}\n", expected), err
        assert ("ValueError: no" in err) == (code == "raise"), err


def test_it_ends_when_its_rank_is_killed(start: Any, tmp_path: Path) -> None:
    started = start(2, "wait")
    paths = [tmp_path / f"pid{rank}" for rank in range(2)]
    until(lambda: all(path.exists() for path in paths), "all ranks")
    for process in started:
        process.send_signal(signal.SIGKILL)
    for path in paths:
        pid = int(path.read_text())
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or not runs(pid), f"the end of {pid}")
