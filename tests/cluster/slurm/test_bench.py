"""`mlflash bench` as srun starts it."""

from __future__ import annotations

import json

import pytest
from bench_reports import MLFLASH, check
from cluster.jobs import NETMODS
from cluster.slurm.daemons import Slurm


@pytest.mark.timeout(400)
def test_a_report_is_made_under_srun(slurm: Slurm) -> None:
    out, env = slurm.path / "report.json", {**NETMODS["ofi"], "OMP_NUM_THREADS": "1"}
    two = ["-N2", "--ntasks-per-node=1", "--mpi=pmi2"]
    done = slurm.run("srun", *two, MLFLASH, "bench", "--size=1MiB", f"--out={out}", env=env, timeout=360, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    check(report)
    assert report["fabric"]["between"] == "network" and report["nodes"][0]["slurm"].startswith("slurm")
    assert "host1" not in done.stdout and f"The report is in {out}" in done.stdout
