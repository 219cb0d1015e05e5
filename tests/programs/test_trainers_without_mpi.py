"""Trainers of DCP and FSDP whose couriers are processes: saved, begun again from memory, and no MPI in any of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("MLFLASH_TEST_MPI") == "openmpi", reason="needs MPICH: Open MPI speaks no PMI-1"),
]
ENV = {"PYTHONWARNINGS": "ignore", "MLFLASH_COURIER": "process", "MLFLASH_TEST_BLOCK_NBYTES": "16384"}  # fmt: skip


def test_dcp(shm: Path) -> None:
    cluster = Cluster(shm)
    losses = []
    for last in (2, 4):
        result = cluster.run(2, "support/dcp_worker.py", json.dumps({"last": last}), env=ENV)
        assert result.with_mpi == [False] * 2, result.log
        assert [record["step"] for record in result.of("restored")] == [max(0, last - 2)] * 2
        assert [record["steps"][-1] for record in result.of("end")] == [last] * 2, result.log
        losses.append({(record["step"], record["loss"]) for record in result.of("loss")})
    begun_anew = cluster.run(2, "support/dcp_worker.py", json.dumps({"last": 4}), env={**ENV, "MLFLASH_JOB": "other"})
    assert {(record["step"], record["loss"]) for record in begun_anew.of("loss")} == losses[0] | losses[1]


def test_fsdp_where_a_group_of_some_ranks_saves_and_all_load(shm: Path) -> None:
    cluster = Cluster(shm, ranks_per_node=2)
    digests = []
    for found, last in ((None, "4"), (4, "6")):
        result = cluster.run(4, "programs/smp_job.py", "page", last, env=ENV)
        assert result.with_mpi == [False] * 4, result.log
        assert [record["step"] for record in result.of("loaded")] == [found] * 4
        digests.append([{record["digest"] for record in result.of(event)} for event in ("loaded", "ended")])
    assert digests[1][0] < digests[0][1], "what the replica that saved has ended with, on all ranks"
    assert len(digests[1][0]) == len(digests[1][1]) == 1
