"""`mlflash top` under a real Slurm: from a node of the job, and from outside by its number."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cluster.slurm.daemons import Slurm
from cluster.slurm.test_run import Training

MLFLASH = str(Path(sys.executable).with_name("mlflash"))


def test_top_asks_all_nodes_of_the_job(slurm: Slurm) -> None:
    training = Training(slurm, pause=0.2)
    training.wait_for_step(20)
    options = ["--directory", str(training.directory), "--slurm-job", training.job.id]
    page = slurm.run(MLFLASH, "top", "--once", *options, timeout=60).stdout
    assert "2 of 2 ranks alive on 2 of 2 nodes" in page, page
    told = json.loads(slurm.run(MLFLASH, "top", "--json", *options, timeout=60).stdout)
    assert [(heartbeat["rank"], heartbeat["node"], heartbeat["alive"]) for heartbeat in told["ranks"]] == [
        (0, "host1", True), (1, "host2", True),
    ]  # fmt: skip
    assert all(heartbeat["committed"] >= 19 for heartbeat in told["ranks"]) and told["silent"] == []
    assert set(told["free"]) == {"host1", "host2", "host3"}, "the spare is a node of the job, too"
    training.job.cancel()
