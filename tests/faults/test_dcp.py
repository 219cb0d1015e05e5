"""FSDP2 with async DCP saves is killed in the middle of one: it goes on as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import Cluster, Result

LAST = 6
ENV = {"PYTHONWARNINGS": "ignore", "MLFLASH_TEST_BLOCK_NBYTES": "16384"}


def run(cluster: Cluster, ranks: int, **spec: Any) -> Result:
    return cluster.run(ranks, "support/dcp_worker.py", json.dumps(spec), env=ENV, timeout=90)


def losses(result: Result) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in result.of("loss") if record["rank"] == 0}


def test_a_job_killed_in_an_async_dcp_save_goes_on_where_it_was(shm: Path) -> None:
    uninterrupted = losses(run(Cluster(shm, job="undisturbed"), 2, last=LAST))
    assert sorted(uninterrupted) == [*range(1, LAST + 1)]
    cluster = Cluster(shm)
    # Steps 1 to 3 are saved; in the save of the fourth, rank 1 dies with its node and its node's memory.
    trap = {"path": ["protect.announced"] * 4, "action": "wipe", "rank": 1}
    job = cluster.start(2, "support/dcp_worker.py", json.dumps({"last": LAST, "traps": [trap]}), env=ENV)
    crashed = job.wait(90)
    assert any(job.out.glob("sprung*")) and not crashed.of("end"), crashed.log
    committed = max((record["step"] for record in crashed.of("committed")), default=0)
    result = run(cluster, 2, last=LAST)
    restored = {record["step"] for record in result.of("restored")}
    assert len(restored) == 1 and restored.pop() in range(max(committed, 1), 5), crashed.log + result.log
    assert [record["steps"][-1] for record in result.of("end")] == [LAST] * 2, result.log
    assert losses(crashed) | losses(result) == uninterrupted
    assert result.with_mpi == [False] * 2, result.log
