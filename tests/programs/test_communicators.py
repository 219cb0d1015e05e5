"""Which ranks save together, and by which MPI: `comm=`, and a program that uses MPI itself, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT
from processes import OPEN_MPI, by_open_mpi, free_port
from waiting import PATIENCE_S

from mlflash.run.processes import mpiexec
from mlflash.tools.doctor_checks import try_couriers
from mlflash.tools.doctor_findings import Level

pytestmark = needs.MPI
PROGRAM = """
import json, os, sys
import numpy as np
import mlflash
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
turns = [(None, "all")]
if sys.argv[1] != "none":
    from mpi4py import MPI
    world, half = MPI.COMM_WORLD, (MPI.COMM_WORLD.Split(rank // 2, -rank), f"half{rank // 2}")
    turns = {"mpi": turns, "world": [(world, "all")], "self": [(MPI.COMM_SELF, f"alone{rank}")],
             "halves": [half, (world, "all"), (None, "none"), half]}[sys.argv[1]]
for step, (comm, job) in enumerate(turns):
    x = np.random.default_rng([rank, step]).standard_normal(100_000)
    state = {"x": np.zeros_like(x), "n": 0}
    with mlflash.Checkpointer(comm=comm, job=job, timeout_s=60) as ckpt:
        ckpt.save(step, {"x": x, "n": rank}).wait()
        assert ckpt.restore(state) == step and state["x"].tobytes() == x.tobytes() and state["n"] == rank
        found = ckpt.report()
        said = {name: found[name] for name in ("rank", "partners", "mpi")} | {"pid": ckpt._courier._connection.pid}
        print(json.dumps({"by": rank, "turn": step} | said) + "\\n", end="", flush=True)
"""


def run(command: tuple[list[str], dict[str, str]], shm: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = command[1] | {"MLFLASH_MEMORY": str(shm), "RANKS_PER_NODE": "1", "TMPDIR": str(shm)} | more
    # Not in the checkout, which python -c would import from.
    return subprocess.run(command[0], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd="/")


def words(python: str | Path, how: str) -> list[str]:
    return [str(python), str(SUPPORT / "on_node.py"), str(python), "-c", PROGRAM, how]


def said(done: subprocess.CompletedProcess[str]) -> dict[tuple[int, int], Any]:
    """What each rank has said in each turn."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["turn"], line["by"]): line for line in lines}


@pytest.mark.parametrize(("how", "ranks"), [
    ("none", [[0, 1, 2, 3]]), ("mpi", [[0, 1, 2, 3]]), ("world", [[0, 1, 2, 3]]), ("self", [[0, 0, 0, 0]]),
    pytest.param("halves", [[1, 0, 1, 0], [0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 1, 0]], marks=pytest.mark.gate),
])  # fmt: skip
def test_the_ranks_of_a_communicator_save_and_restore_together(shm: Path, how: str, ranks: list[list[int]]) -> None:
    found = said(run(mpiexec(4, words(sys.executable, how), {**os.environ}), shm))
    assert [[found[turn, by]["rank"] for by in range(4)] for turn in range(len(ranks))] == ranks
    assert all(bool(line["partners"]) == ("MPICH" in line["mpi"]) == (how != "self") for line in found.values())
    if how == "halves":
        pids = [[found[turn, by]["pid"] for by in range(4)] for turn in range(4)]
        assert pids[0] == pids[3] and pids[1] == pids[2] and not {*pids[0]} & {*pids[1]}, "one set of couriers for each"


@needs.OPEN_MPI_BESIDE
@pytest.mark.parametrize("how", ["none", "halves"])
def test_a_trainer_may_use_open_mpi_while_couriers_use_mpich(shm: Path, how: str) -> None:
    command, names = by_open_mpi(4, words(OPEN_MPI / "python", how))
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = said(run((command, {**os.environ, **names}), shm))
    assert all(line["partners"] and line["mpi"].startswith("MPICH ") for line in found.values())
    refused = run((command, {**os.environ, **names}), shm, MLFLASH_LIBMPI=str(OPEN_MPI.parent / "lib/libmpi.so.40"))
    assert refused.returncode and "MpiUnavailable: couriers need an MPI that starts without its" in refused.stderr
    assert "pip install 'mlflash[mpich]'" in refused.stderr and "found:    Open MPI" in refused.stderr


def test_a_library_that_is_not_there_is_said_with_what_names_it(shm: Path) -> None:
    done = run(mpiexec(2, words(sys.executable, "none"), {**os.environ}), shm, MLFLASH_LIBMPI="/nowhere/libmpi.so")
    assert done.returncode and "MpiUnavailable: couriers cannot be started: " in done.stderr
    assert "name the library of your cluster's MPI in MLFLASH_LIBMPI" in done.stderr
    assert "/nowhere/libmpi.so: cannot open shared object file" in done.stderr


def test_where_no_process_can_be_watched_it_is_said_why(shm: Path, tmp_path: Path) -> None:
    """As in a container whose profile refuses pidfd_open, which here Python does."""
    refuse = "def refuse(pid, flags=0):\n    raise PermissionError(1, 'Operation not permitted')\n"
    (tmp_path / "sitecustomize.py").write_text(f"import os\n{refuse}os.pidfd_open = refuse\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(([sys.executable, "-c", PROGRAM, "none"], env), shm)
    assert done.returncode and "MpiUnavailable: couriers cannot be started: " in done.stderr
    assert "no process can be watched here (pidfd_open: Operation not permitted)" in done.stderr
    found = try_couriers(env, str(shm))
    assert found.level is Level.WARNING and "the container's profile" in found.advice


def test_the_doctor_tries_whether_couriers_start_without_a_launcher(shm: Path) -> None:
    environment = {**os.environ, "MLFLASH_MEMORY": str(shm)}
    done = subprocess.run([sys.executable, "-m", "mlflash", "doctor", "--json"], env=environment, text=True,
                          capture_output=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    (line,) = [line for line in json.loads(done.stdout)["lines"] if line["check"] == "couriers"]
    assert line["level"] == "ok" and "two ranks saved without a launcher after " in line["text"]
    broken = environment | {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "of nobody"}
    found = try_couriers(broken, str(shm))
    assert found.level is Level.WARNING and "couriers could not save: " in found.text
