"""A restart on another number of ranks that is killed on the way: nothing of the checkpoint is lost, bits compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Cluster, train_and_die

CHUNKS = {"MLFLASH_TEST_BLOCK_NBYTES": "16384"}


@pytest.mark.parametrize(
    ("point", "dies", "who", "again"),
    [("transfer.sent", "node", 1, 2), ("commit.recorded", "wipe", 0, 4)],
)
def test_a_crash_while_it_is_put_together_for_other_ranks(
    shm: Path, point: str, dies: str, who: int, again: int
) -> None:
    # Four ranks on two nodes, then two, then two or four again; weights are alike, the rest is each rank's own.
    cluster = Cluster(shm, 2)
    state = {"alike": True, "options": {"redundancy": "copy"}}
    train_and_die(cluster, 4, 3, CHUNKS, **state)
    cluster.ranks_per_node = 1
    # No save: it is the restore that passes the points of a commit.
    trap = {"path": [point], "action": dies, "rank": who}
    job = cluster.start(2, "support/worker.py", json.dumps({**state, "more": 0, "traps": [trap]}), env=CHUNKS)
    crashed = job.wait()
    assert any(job.out.glob("sprung*")), crashed.log
    cluster.ranks_per_node = again // 2
    result = cluster.run(again, "support/worker.py", json.dumps({**state, "more": 2}), env=CHUNKS)
    restored = result.of("restored")
    assert [(r["step"], r["wrong"]) for r in restored if r["rank"] < 2] == [(3, [])] * 2, crashed.log + result.log
    assert len(result.of("end")) == again, result.log
    assert {tuple(r["steps"]) for r in result.of("end")} == {(4, 5)}
