"""What a courier is where a program leaves that open (`courier="auto"`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from processes import OPEN_MPI, by_open_mpi
from waiting import PATIENCE_S

from mlflash.doctor.couriers import try_couriers
from mlflash.doctor.findings import Level
from mlflash.launcher.processes import mpiexec

pytestmark = needs.MPI
SCRIPT = """
import mlflash
with mlflash.Checkpointer(memory={memory!r}, job="j", courier="auto"{given}) as ckpt:
    ckpt.save(1, {{"a": 1}}).wait()
    if ckpt.report()["rank"] == 0:
        print("it is a", ckpt.report()["courier"], "libmpi" in open("/proc/self/maps").read())
"""


def said_by(command: list[str], env: dict[str, str]) -> str:
    # Not in the checkout, which python -c would import from.
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd="/")
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


@needs.PMI_1
def test_where_no_process_can_be_watched_it_is_a_thread_and_says_why(shm: Path, tmp_path: Path) -> None:
    """As in a container whose profile refuses pidfd_open, which here Python does."""
    refuse = "def refuse(pid, flags=0):\n    raise PermissionError(1, 'Operation not permitted')\n"
    (tmp_path / "sitecustomize.py").write_text(f"import os\n{refuse}os.pidfd_open = refuse\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    script = SCRIPT.format(memory=str(shm), given="")
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE_S,
                          check=True, cwd="/")  # fmt: skip
    assert "it is a thread (a process cannot be started for it; the output above says why)" in done.stdout
    assert "no process can be watched here (pidfd_open: Operation not permitted)" in done.stderr
    assert "Traceback" not in done.stderr
    found = try_couriers(env, str(shm))
    assert found.level is Level.WARNING and "the container's profile" in found.advice


@needs.OPEN_MPI_BESIDE
def test_with_open_mpi_it_is_a_thread_and_says_why(shm: Path) -> None:
    words = [str(OPEN_MPI / "python"), "-c", SCRIPT.format(memory=str(shm), given="")]
    command, names = by_open_mpi(2, words)
    said = said_by(command, {**os.environ, **names, "TMPDIR": str(shm)})
    assert "it is a thread (Open MPI cannot be started without its launcher) True" in said


@needs.OPEN_MPI_BESIDE
def test_with_open_mpi_a_process_is_refused_with_what_to_install(shm: Path) -> None:
    """Whoever has started the ranks: its library starts by its own launcher alone, which has no part in a courier."""
    script = SCRIPT.format(memory=str(shm), given="").replace('"auto"', '"process"')
    for rank in range(2):
        names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
        done = subprocess.run([str(OPEN_MPI / "python"), "-c", script], env={**os.environ, **names}, text=True,
                              capture_output=True, timeout=PATIENCE_S, check=False)  # fmt: skip
        assert done.returncode == 1 and "MpiUnavailable: couriers that are processes need an MPI that" in done.stderr
        assert "pip install 'mlflash[mpich]'" in done.stderr and "found:    Open MPI" in done.stderr


@needs.PMI_1
def test_the_doctor_tries_whether_couriers_start_without_a_launcher(shm: Path) -> None:
    environment = {**os.environ, "MLFLASH_MEMORY": str(shm), "MLFLASH_COURIER": "auto"}
    done = subprocess.run([sys.executable, "-m", "mlflash", "doctor", "--json"], env=environment, text=True,
                          capture_output=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    (line,) = [line for line in json.loads(done.stdout)["lines"] if line["check"] == "couriers"]
    assert line["level"] == "ok" and "two ranks saved without a launcher after " in line["text"]
    broken = environment | {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "of nobody"}
    found = try_couriers(broken, str(shm))
    assert found.level is Level.WARNING and "does not start without its launcher: " in found.text
