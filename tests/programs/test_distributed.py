"""torch.distributed from MPI, where there is none: alone it works, under torchrun it says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
