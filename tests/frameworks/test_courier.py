"""Every framework's trainer with a courier that is a process: it goes on with the same bits, and never loads MPI."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from frameworks.test_contract import ENV, LAST, RANKS, VARIANTS, digests, losses
from harness import Cluster

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.environ.get("MLFLASH_TEST_MPI") == "openmpi", reason="needs MPICH: Open MPI speaks no PMI-1"),
]


@pytest.mark.parametrize("framework", VARIANTS)
def test_a_trainer_without_mpi_goes_on_from_memory_with_the_same_bits(shm: Path, framework: str) -> None:
    common = {"variant": VARIANTS[framework][0]}
    runs = [
        {"name": "reference", "last": LAST, "job": "reference", "enabled": False},
        {"name": "first", "last": 5, "job": "interval", "every": 2},
        {"name": "second", "last": LAST, "job": "interval", "every": 2},
    ]
    spec = {"framework": framework, "runs": [common | one for one in runs]}
    result = Cluster(shm).run(RANKS, "frameworks/job.py", json.dumps(spec), timeout=200,
                              env={**ENV, "MLFLASH_COURIER": "process"})  # fmt: skip
    assert len(result.of("done")) == len(runs) * RANKS, result.log
    assert result.with_mpi == [False] * RANKS, result.log
    expected = losses(result, "reference")
    assert losses(result, "first") == {key: loss for key, loss in expected.items() if key[1] <= 5}
    assert losses(result, "second") == {key: loss for key, loss in expected.items() if key[1] >= 5}
    assert digests(result, "second") == digests(result, "reference")
