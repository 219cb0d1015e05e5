"""`mlflash run --keep-alive` in an allocation of Slurm: who is left stays, whatever Slurm knows of the node by then."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from cluster.jobs import NETMODS, NETMODS_HERE, TESTS, VENDOR
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MLFLASH
from run_results import Results
from waiting import until

pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(VENDOR == "openmpi", reason="needs MPICH: Open MPI cannot start without its launcher")
TRAINER = TESTS / "kept_trainer.py"
LAST = 40
SCRIPT = """#!/bin/sh
exec "$MLFLASH" run -N 2 --ranks-per-node 1 --keep-alive --lost-after 2 --job kept --journal "$OUT/run.jsonl" -- \\
  "$PYTHON" "$TRAINER" "$OUT" "$LAST" "$TRAINING"
"""


class Training(Results):
    """A job on three nodes, of which one waits, and what it writes."""

    def __init__(self, slurm: Slurm):
        super().__init__(slurm.path / "out")
        paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        training = json.dumps({"hold_at": 20, "settings": {"job": "kept"}})
        env = {**NETMODS[NETMODS_HERE[-1]], "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable,
               "MLFLASH": str(MLFLASH), "TRAINER": str(TRAINER), "OUT": str(self.out), "LAST": str(LAST),
               "TRAINING": training}  # fmt: skip
        self.slurm = slurm
        self.job = slurm.sbatch(SCRIPT, "--nodes=3", "--exclusive", "--no-kill", env=env)

    def log(self) -> str:
        return f"{self.job.output()}\n{self.slurm.logs()}"

    def steps(self, rank: int) -> list[list[str]]:
        path = Path(self.out / f"steps-{rank}")
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("power_cut", [False, True], ids=["crash", "power cut"])
def test_a_lost_node_ends_its_own_step_only(slurm: Slurm, power_cut: bool) -> None:
    training = Training(slurm)
    until(lambda: all(len(training.steps(rank)) >= 18 for rank in range(2)), training.log)
    before = training.steps(0)[-1][2]
    slurm.nodes.crash("host2", power_cut)
    (training.out / "go on").touch()
    training.job.wait("COMPLETED")
    ends = training.ends()
    assert [end["node"] for end in ends] == ["host1", "host3"], training.log()
    assert str(ends[0]["pid"]) == before and [end["entries"] for end in ends] == [2, 1], training.log()
    (recovered,) = training.events("recovered")
    assert recovered["lost"] == [1] and recovered["step"] >= 17 and len(training.events("start")) == 1
    print(recovered)
