"""SMP's recipes as its page has them: whatever a replica has saved, all replicas go on from; also with TP and EP."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Cluster

SHARDS = {"replicas": 2, "tensor_and_fsdp": 4, "experts_alone": 2, "experts_and_fsdp": 4}


@pytest.mark.slow
def test_replicas_shards_and_experts_go_on_with_the_same_bits_after_a_kill_while_they_are_saved(shm: Path) -> None:
    cluster, environment = Cluster(shm), {"PYTHONWARNINGS": "ignore"}  # torch's own
    killed = cluster.run(4, "programs/smp_job.py", "6", "4", env=environment)
    assert killed.returncode != 0 and not killed.of("ended"), killed.log
    assert {record["step"] for record in killed.of("loaded")} == {None}
    again = cluster.run(4, "programs/smp_job.py", "7", env=environment)
    assert again.returncode == 0, again.log
    assert again.with_mpi == [False] * 4
    assert len(again.of("ended")) == 4 * len(SHARDS)
    for kind, shards in SHARDS.items():
        steps = [record["step"] for record in again.of("loaded") if record["kind"] == kind]
        assert steps in ([3] * 4, [4] * 4), (kind, steps)
        ended = [record for record in again.of("ended") if record["kind"] == kind]
        assert all(record["digest"] == record["alone"] for record in ended), kind
        assert len({record["digest"] for record in ended}) == shards, "shards and experts differ"
