"""Trainers that srun starts, with and without its PMI, start their couriers with one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster.jobs import VENDOR
from cluster.slurm.daemons import Slurm
from cluster.test_couriers import check, trainer

pytestmark = pytest.mark.skipif(VENDOR == "openmpi", reason="needs MPICH: Open MPI speaks no PMI-1")


def run(slurm: Slurm, name: str, options: list[str], *more: str, **trainers: Any) -> Path:
    folder = slurm.path / name
    folder.mkdir()
    slurm.run("srun", *options, *trainer(folder, *more, **trainers))
    return folder


def test_ranks_of_srun_have_couriers(slurm: Slurm) -> None:
    two = ["-N2", "--ntasks-per-node=1"]
    folder = run(slurm, "pmi2", [*two, "--mpi=pmi2"])
    check(slurm.nodes, folder, "srun", [0, 1])
    folder = run(slurm, "port", [*two, "--mpi=none"], "MASTER_ADDR=host1", "MASTER_PORT=29400")
    check(slurm.nodes, folder, "srun", [0, 1])
    folder = run(slurm, "directory", ["-N1", "-n2", "--mpi=none"], directory="/dev/shm/private")
    check(slurm.nodes, folder, "srun", [0, 0])
    folder = run(slurm, "nothing", [*two, "--mpi=none"], do="fails", directory="/dev/shm/private")
    for rank in ("0", "1"):
        said = json.loads((folder / rank).read_text())
        assert said["kind"] == "WorldMismatch" and "set MASTER_ADDR to the name of rank 0's host" in said["error"]
        assert said["children"] == []
