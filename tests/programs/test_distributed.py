"""torch.distributed without MPI, and with a communicator of a part of its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlflash.run.processes import mpiexec


def run(*command: str, shm: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))}
    return subprocess.run(command, env={**environment, "MLFLASH_MEMORY": str(shm), "MLFLASH_JOB": "j"}, cwd=shm,
                          timeout=100, capture_output=True, text=True, check=False)  # fmt: skip


def test_a_comm_that_is_given_is_taken_whatever_a_launcher_says(shm: Path) -> None:
    program = """
import mlflash
from mpi4py import MPI
with mlflash.Checkpointer(comm=MPI.COMM_SELF, redundancy="none") as ckpt:
    assert ckpt.save(1, {"a": 1}).wait().committed
"""
    found = run("env", "RANK=1", "WORLD_SIZE=2", sys.executable, "-c", program, shm=shm)
    assert found.returncode == 0, found.stderr


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
def test_a_trainer_needs_no_mpi(
    shm: Path, launcher: str, order: str, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm / "script.py").write_text(WITHOUT_MPI)
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = torchrun if launcher == "torchrun" else mpiexec(2, [sys.executable])[0]
    found = run(*command, "script.py", order, shm=shm)
    assert found.returncode == 0 and found.stdout.count("saved without MPI") == 2, found.stdout + found.stderr


def test_one_process_alone_is_a_group_of_one(shm: Path) -> None:
    program = """
import os, torch.distributed as dist
from mlflash.adapters.distributed import init_process_group
for _ in range(2):
    init_process_group()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1) and os.environ["LOCAL_WORLD_SIZE"] == "1"
    dist.destroy_process_group()
"""
    found = run(sys.executable, "-c", program, shm=shm)
    assert found.returncode == 0, found.stderr
