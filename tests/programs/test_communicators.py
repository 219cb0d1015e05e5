"""Which ranks save together, and by which MPI: `comm=`, torch.distributed, a program that uses MPI itself, or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT
from processes import OPEN_MPI, by_open_mpi, free_port, ran, runs
from waiting import PATIENCE_S, until

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


def run(command: tuple[list[str], dict[str, str]], shm: Path, code: int | None = 0, **more: str
        ) -> subprocess.CompletedProcess[str]:  # fmt: skip
    words, env = command
    return ran(*words, code=code, env=env, MLFLASH_MEMORY=shm, RANKS_PER_NODE=1, TMPDIR=shm, **more)


def words(python: str | Path, how: str) -> list[str]:
    return [str(python), str(SUPPORT / "on_node.py"), str(python), "-c", PROGRAM, how]


def printed(done: subprocess.CompletedProcess[str]) -> dict[tuple[int, int], Any]:
    """What each rank has printed in each turn."""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["turn"], line["by"]): line for line in lines}


@pytest.mark.parametrize(("how", "ranks"), [
    ("none", [[0, 1, 2, 3]]), ("mpi", [[0, 1, 2, 3]]), ("world", [[0, 1, 2, 3]]), ("self", [[0, 0, 0, 0]]),
    pytest.param("halves", [[1, 0, 1, 0], [0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 1, 0]], marks=pytest.mark.gate),
])  # fmt: skip
def test_the_ranks_of_a_communicator_save_and_restore_together(shm: Path, how: str, ranks: list[list[int]]) -> None:
    found = printed(run(mpiexec(4, words(sys.executable, how), {**os.environ}), shm))
    assert [[found[turn, by]["rank"] for by in range(4)] for turn in range(len(ranks))] == ranks
    assert all(bool(line["partners"]) == ("MPICH" in line["mpi"]) == (how != "self") for line in found.values())
    if how == "halves":
        pids = [[found[turn, by]["pid"] for by in range(4)] for turn in range(4)]
        assert pids[0] == pids[3] and pids[1] == pids[2] and not {*pids[0]} & {*pids[1]}, "one set of couriers for each"


@needs.OPEN_MPI_BESIDE
@pytest.mark.parametrize("how", ["none", "halves"])
def test_a_trainer_may_use_open_mpi_while_couriers_use_mpich(shm: Path, how: str) -> None:
    command, names = by_open_mpi(4, words(OPEN_MPI / "python", how))
    # The nodes that are emulated here have no memory in common, in which ranks of one host keep their secret.
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "MLFLASH_TOKEN": "of this test"}
    found = printed(run((command, {**os.environ, **names}), shm))
    assert all(line["partners"] and line["mpi"].startswith("MPICH ") for line in found.values())
    library = str(OPEN_MPI.parent / "lib/libmpi.so.40")
    refused = run((command, {**os.environ, **names}), shm, None, MLFLASH_LIBMPI=library)
    assert "MpiUnavailable: couriers need an MPI that starts without its" in refused.stderr
    assert "pip install 'mlflash[mpich]'" in refused.stderr and "found:    Open MPI" in refused.stderr


def test_a_library_that_is_not_there_is_said_with_what_names_it(shm: Path) -> None:
    command = mpiexec(2, words(sys.executable, "none"), {**os.environ})
    done = run(command, shm, None, MLFLASH_LIBMPI="/nowhere/libmpi.so")
    assert "MpiUnavailable: couriers cannot be started: " in done.stderr
    assert "name the library of your cluster's MPI in MLFLASH_LIBMPI" in done.stderr
    assert "/nowhere/libmpi.so: cannot open shared object file" in done.stderr


def test_where_no_process_can_be_watched_it_is_said_why(shm: Path, tmp_path: Path) -> None:
    """As in a container whose profile refuses pidfd_open, which here Python does."""
    refuse = "def refuse(pid, flags=0):\n    raise PermissionError(1, 'Operation not permitted')\n"
    (tmp_path / "sitecustomize.py").write_text(f"import os\n{refuse}os.pidfd_open = refuse\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(([sys.executable, "-c", PROGRAM, "none"], env), shm, None)
    assert "MpiUnavailable: couriers cannot be started: " in done.stderr
    assert "no process can be watched here (pidfd_open: Operation not permitted)" in done.stderr
    found = try_couriers(env, str(shm))
    assert found.level is Level.WARNING and "the container's profile" in found.advice


def test_the_doctor_tries_whether_couriers_start_without_a_launcher(shm: Path) -> None:
    environment = {**os.environ, "MLFLASH_MEMORY": str(shm)}
    command = [sys.executable, "-m", "mlflash", "doctor", "--json"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    (line,) = [line for line in json.loads(done.stdout)["lines"] if line["check"] == "couriers"]
    assert line["level"] == "ok" and "two ranks saved without a launcher after " in line["text"]
    broken = environment | {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "of nobody"}
    found = try_couriers(broken, str(shm))
    assert found.level is Level.WARNING and "couriers could not save: " in found.text


# torch.distributed without MPI


def test_a_comm_that_is_given_is_taken_whatever_a_launcher_says(shm: Path) -> None:
    program = """
import mlflash
from mpi4py import MPI
with mlflash.Checkpointer(comm=MPI.COMM_SELF, redundancy="none") as ckpt:
    assert ckpt.save(1, {"a": 1}).wait().committed
"""
    ran(sys.executable, "-c", program, cwd=shm, MLFLASH_MEMORY=shm, MLFLASH_JOB="j", RANK=1, WORLD_SIZE=2)


WITHOUT_MPI = """
import os, sys, mlflash, torch, torch.distributed as dist
from mlflash.adapters.distributed import init_process_group
if sys.argv[1] == "group first":
    init_process_group("gloo")
with mlflash.Checkpointer(redundancy="none") as ckpt:
    if not dist.is_initialized():
        init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2 and os.environ["LOCAL_RANK"] == os.environ["RANK"] == str(dist.get_rank())
    snapshot = ckpt.save(1, {"a": 1})
    snapshot.wait()
    assert snapshot.committed == ckpt.enabled
dist.destroy_process_group()
assert "libmpi" not in open("/proc/self/maps").read()
print("saved without MPI")
"""


@pytest.mark.parametrize(("launcher", "order", "more"), [
    pytest.param("torchrun", "group first", {}, marks=pytest.mark.gate),
    ("torchrun", "group first", {"MLFLASH_DISABLE": "1"}),
    ("mpiexec", "group first", {}), ("mpiexec", "Checkpointer first", {}),
    ("mpiexec", "group first", {"MLFLASH_DISABLE": "1"}),
])  # fmt: skip
def test_a_trainer_needs_no_mpi(shm: Path, launcher: str, order: str, more: dict[str, str]) -> None:
    (shm / "script.py").write_text(WITHOUT_MPI)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = torchrun if launcher == "torchrun" else mpiexec(2, [sys.executable])[0]
    done = ran(*command, "script.py", order, cwd=shm, MLFLASH_MEMORY=shm, MLFLASH_JOB="j", **more)
    assert done.stdout.count("saved without MPI") == 2, done.stdout + done.stderr


def test_one_process_alone_is_a_group_of_one(shm: Path) -> None:
    program = """
import os, torch.distributed as dist
from mlflash.adapters.distributed import init_process_group
for _ in range(2):
    init_process_group()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1) and os.environ["LOCAL_WORLD_SIZE"] == "1"
    dist.destroy_process_group()
"""
    ran(sys.executable, "-c", program, cwd=shm)


# Programs with MPI on ranks that no launcher of MPI has started, as `mlflash run` by ssh scavenges

ON_RANKS = """
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
    (tmp_path / "the_program.py").write_text(ON_RANKS)
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
