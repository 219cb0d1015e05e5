"""SMP's recipes as its page has them: whatever a replica has saved, all replicas go on from; also with TP and EP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import COURIER, Cluster, Result

pytestmark = pytest.mark.slow


def ran(cluster: Cluster, *args: str) -> Result:
    return cluster.run(4, "programs/smp_job.py", *args, env={"PYTHONWARNINGS": "ignore"})  # torch's own


@pytest.mark.parametrize(
    ("ids", "ranks_per_node"), [("page", 2), ("script", 4)], ids=["a replica on each node", "one node"]
)
def test_all_replicas_go_on_with_the_step_and_the_bits_that_one_has_saved(
    shm: Path, ids: str, ranks_per_node: int
) -> None:
    cluster = Cluster(shm, ranks_per_node=ranks_per_node)
    first = ran(cluster, ids, "9", "4")
    assert first.returncode != 0, "it was killed"
    assert {r["step"] for r in first.of("loaded")} == {None} and "nothing was saved under the id" in first.log
    assert "are on node0, and what they save is lost with it" in first.log
    again = ran(cluster, ids, "9")
    assert again.returncode == 0, again.log
    assert COURIER == "thread" or again.with_mpi == [False] * 4
    loaded, ended = again.of("loaded"), again.of("ended")
    assert [len(loaded), len(ended)] == [4, 4]
    assert {r["step"] for r in loaded} == {4} and len({r["digest"] for r in loaded}) == 1, loaded
    assert len({r["digest"] for r in ended}) == 1
    jobs = {path.name for path in shm.glob(f"node*/mlflash-{os.getuid()}/*") if path.is_dir()}
    assert len(jobs) == 1, "all saves of one thing take turns in the same slots"


def test_tensor_and_expert_parallelism_go_on_with_the_same_bits_after_a_kill_while_they_are_saved(shm: Path) -> None:
    cluster, environment = Cluster(shm), {"PYTHONWARNINGS": "ignore"}
    killed = cluster.run(4, "programs/smp_parallel_job.py", "6", "4", env=environment)
    assert killed.returncode != 0 and not killed.of("ended"), killed.log
    again = cluster.run(4, "programs/smp_parallel_job.py", "7", env=environment)
    assert again.returncode == 0, again.log
    ended = again.of("ended")
    kinds = {one["kind"] for one in ended}
    assert len(ended) == 20 and len(kinds) == 5
    for kind in kinds:
        steps = [one["step"] for one in again.of("loaded") if one["kind"] == kind]
        assert steps in ([3] * 4, [4] * 4), (kind, steps)
        mine = [one for one in ended if one["kind"] == kind]
        assert all(one["digest"] == one["alone"] for one in mine), kind
        assert len({one["digest"] for one in mine}) == (2 if kind.endswith("alone") else 4), "shards and experts differ"
