"""FSDP2 with async DCP saves is killed in the middle of one: it goes on as if nothing had been, on fewer ranks too."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result

LAST = 6
ENV = {"PYTHONWARNINGS": "ignore", "MLFLASH_BLOCK_NBYTES": "65536", "MLFLASH_CHUNK_NBYTES": "65536"}


def run(cluster: Cluster, ranks: int, **spec: Any) -> Result:
    return cluster.run(ranks, "dcp_worker.py", json.dumps(spec), env=ENV, timeout=90)


def losses(result: Result) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in result.of("loss") if record["rank"] == 0}


@pytest.fixture(scope="module")
def uninterrupted() -> Iterator[dict[int, float]]:
    root = Path(tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm"))
    result = run(Cluster(root, 2), 4, last=LAST)
    shutil.rmtree(root)
    assert sorted(losses(result)) == [*range(1, LAST + 1)], result.log
    yield losses(result)


@pytest.mark.parametrize(
    ("point", "dies", "again"),
    [("stage.copied", "rank", 4), ("commit.recorded", "wipe", 2)],  # most of the time they import torch
)
def test_a_job_killed_in_an_async_dcp_save_goes_on_where_it_was(
    shm: Path, uninterrupted: dict[int, float], point: str, dies: str, again: int
) -> None:
    cluster = Cluster(shm, 2)
    # Steps 1 to 3 are saved; in the save of the fourth, rank 3 dies, with its node, or with its node's memory.
    trap = {"path": [point] * 4, "action": dies, "rank": 3}
    job = cluster.start(4, "dcp_worker.py", json.dumps({"last": LAST, "traps": [trap]}), env=ENV)
    crashed = job.wait(90)
    assert any(job.out.glob("sprung*")) and not crashed.of("end"), crashed.log
    committed = max((record["step"] for record in crashed.of("committed")), default=0)
    cluster.ranks_per_node = again // 2
    result = run(cluster, again, last=LAST)
    restored = {record["step"] for record in result.of("restored")}
    assert len(restored) == 1 and restored.pop() in range(max(committed, 1), 5), crashed.log + result.log
    assert [record["steps"][-1] for record in result.of("end")] == [LAST] * again, result.log
    found = losses(crashed) | losses(result)
    if again == 4:
        assert found == uninterrupted
    else:  # sums are rounded in another order
        assert found == pytest.approx(uninterrupted, rel=1e-5)
