"""Trainers that srun starts, with and without its PMI, start their couriers with one call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.jobs import NETMODS, NETMODS_HERE, TESTS, VENDOR
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MLFLASH
from cluster.test_couriers import check, trainer
from waiting import PATIENCE_S, until

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


SCRIPT = """#!/bin/sh
step() { srun --overlap -N2 --ntasks-per-node=1 --kill-on-bad-exit=0 "$@"; }
count() { cat "$2"* 2> /dev/null | grep -c "$1"; }
step --mpi=none "$MLFLASH" courier > hosts &
until [ "$(count "start here now" hosts)" = 2 ]; do sleep 0.1; done
OUT=$PWD/out1 step --mpi=pmi2 "$PYTHON" "$TRAINER" "$DIES" &
until [ "$(count '"victim"' out1/rank)" = 2 ]; do sleep 0.1; done
scancel --signal=KILL "$SLURM_JOB_ID.1"
wait $!
OUT=$PWD/out2 step --mpi=pmi2 "$PYTHON" "$TRAINER" "$RESTORES"
scancel --signal=TERM "$SLURM_JOB_ID.0"
wait
"""


def test_couriers_of_another_step_commit_what_a_step_has_handed_over_that_is_killed(slurm: Slurm) -> None:
    """Slurm kills a step with all that its tasks have started: here proctrack/linuxproc follows the parents."""
    for name in ("out1", "out2"):
        (slurm.path / name).mkdir()
    settings = {"memory": "/dev/shm", "job": "j", "timeout_s": PATIENCE_S}
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    env = {**NETMODS[NETMODS_HERE[-1]], "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable,
           "MLFLASH": str(MLFLASH), "TRAINER": str(TESTS / "dying_trainer.py"),
           "DIES": json.dumps({"settings": settings, "who": "trainer", "how": "terminal closed"}),
           "RESTORES": json.dumps({"settings": settings})}  # fmt: skip
    job = slurm.sbatch(SCRIPT, "--nodes=2", "--exclusive", env=env)
    job.wait("COMPLETED")
    lines = [line for path in (slurm.path / "out2").glob("rank*") for line in path.read_text().splitlines()]
    restored = [record for record in map(json.loads, lines) if record["event"] == "restored"]
    assert [(record["step"], record["same"]) for record in restored] == [(2, True)] * 2, job.output()
    for host in slurm.nodes.names:
        until(lambda host=host: not slurm.nodes.running(host, "mlflash.wireup.zygote"), f"no courier is left on {host}")
