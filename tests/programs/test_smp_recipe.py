"""SMP's recipes as its page has them: whatever a replica has saved, all replicas go on from; also with TP and EP."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Cluster

pytestmark = pytest.mark.slow


def test_replicas_tensor_and_expert_parallelism_go_on_with_the_same_bits_after_a_kill_in_a_save(shm: Path) -> None:
    cluster, environment = Cluster(shm), {"PYTHONWARNINGS": "ignore"}
    killed = cluster.run(4, "programs/smp_parallel_job.py", "6", "4", env=environment)
    assert killed.returncode != 0 and not killed.of("ended"), killed.log
    again = cluster.run(4, "programs/smp_parallel_job.py", "7", env=environment)
    assert again.returncode == 0, again.log
    ended = again.of("ended")
    kinds = {one["kind"] for one in ended}
    assert len(ended) == 24 and len(kinds) == 6
    for kind in kinds:
        steps = [one["step"] for one in again.of("loaded") if one["kind"] == kind]
        assert steps in ([3] * 4, [4] * 4), (kind, steps)
        mine = [one for one in ended if one["kind"] == kind]
        assert all(one["digest"] == one["alone"] for one in mine), kind
        parts = 2 if kind.endswith("alone") or "replicas" in kind else 4  # shards and experts differ
        assert len({one["digest"] for one in mine}) == parts, kind
