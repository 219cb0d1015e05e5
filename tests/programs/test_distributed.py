"""torch.distributed from MPI, where there is none: alone it works, under torchrun it says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SAVE = """
with mlflash.Checkpointer(comm={comm}, redundancy="none") as ckpt:
    assert ckpt.save(1, {{"a": 1}}).wait().committed
"""


def run(*command: str, shm: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))}
    return subprocess.run(command, env={**environment, "MLFLASH_MEMORY": str(shm), "MLFLASH_JOB": "j"}, cwd=shm,
                          timeout=100, capture_output=True, text=True, check=False)  # fmt: skip


def torchrun(program: str, shm: Path) -> str:
    (shm / "script.py").write_text(program)
    found = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                "script.py", shm=shm)  # fmt: skip
    assert found.returncode != 0
    return found.stdout + found.stderr


def test_torchrun_without_mpi_is_told_what_to_do(shm: Path) -> None:
    said = torchrun("from mlflash.adapters.distributed import init_process_group\ninit_process_group()", shm)
    assert "start with mpiexec -n RANKS or srun instead" in said


def test_a_checkpointer_under_torchrun_does_not_take_its_ranks_for_one(shm: Path) -> None:
    said = torchrun("import torch, mlflash\ntorch.distributed.init_process_group('gloo')\nmlflash.Checkpointer()", shm)
    assert "start with mpiexec -n RANKS or srun instead" in said


def test_ranks_of_torchrun_that_never_use_torch_do_not_take_each_others_checkpoints(shm: Path) -> None:
    said = torchrun("import mlflash\nmlflash.Checkpointer()", shm)
    assert "each of them is an MPI world of its own" in said and "expected: 2 ranks (WORLD_SIZE)" in said
    assert "comm=MPI.COMM_SELF" in said and not list(shm.glob("mlflash-*"))


def test_one_rank_of_torchrun_is_a_world_of_one(shm: Path) -> None:
    program = "import os, mlflash\nassert os.environ['WORLD_SIZE'] == '1'\n" + SAVE.format(comm=None)
    (shm / "script.py").write_text(program)
    found = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
                "script.py", shm=shm)  # fmt: skip
    assert found.returncode == 0, found.stderr


def test_a_comm_that_is_given_is_taken_whatever_a_launcher_says(shm: Path) -> None:
    program = "import os\nos.environ.update(RANK='1', WORLD_SIZE='2')\nimport mlflash\nfrom mpi4py import MPI\n"
    found = run(sys.executable, "-c", program + SAVE.format(comm="MPI.COMM_SELF"), shm=shm)
    assert found.returncode == 0, found.stderr


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
