"""What a courier is where a program leaves that open (`courier="auto"`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from processes import OPEN_MPI, by_open_mpi
from waiting import PATIENCE_S

from mlflash.launcher.processes import mpiexec

pytestmark = needs.MPI
SCRIPT = """
import mlflash
with mlflash.Checkpointer(memory={memory!r}, job="j", ranks_per_node=1, courier="auto"{given}) as ckpt:
    ckpt.save(1, {{"a": 1}}).wait()
    if ckpt.report()["rank"] == 0:
        print("it is a", ckpt.report()["courier"], "libmpi" in open("/proc/self/maps").read())
"""


def said_by(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [
        ("", "", "it is a process"),
        ("from mpi4py import MPI", "", "it is a thread (this program uses MPI itself) True"),
        ("from mpi4py import MPI", ", comm=MPI.COMM_WORLD", "it is a thread (comm= was given) True"),
        ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI", "", "it is a process"),
    ],
)
def test_it_is_a_process_unless_the_program_uses_mpi(shm: Path, before: str, given: str, expected: str) -> None:
    if os.environ.get("MLFLASH_TEST_MPI") == "openmpi" and "process" in expected:
        expected = "it is a thread (Open MPI cannot be started without its launcher) True"
    script = before + SCRIPT.format(memory=str(shm), given=given)
    said = said_by(*mpiexec(2, [sys.executable, "-c", script], {"TMPDIR": str(shm)}))
    assert expected in said
    assert "process" not in expected or said.rstrip().endswith(str("mpi4py" in before))


@needs.OPEN_MPI_BESIDE
def test_with_open_mpi_it_is_a_thread_and_says_why(shm: Path) -> None:
    words = [str(OPEN_MPI / "python"), "-c", SCRIPT.format(memory=str(shm), given="")]
    command, names = by_open_mpi(2, words)
    said = said_by(command, {**os.environ, **names, "TMPDIR": str(shm)})
    assert "it is a thread (Open MPI cannot be started without its launcher) True" in said
