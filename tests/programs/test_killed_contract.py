"""All that torch and torchdata have in a training: killed, and restored in a new process, plain, with DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Cluster
from torch_table import DDP, FSDP2, PLAIN, of_kind

RANKS = {PLAIN: 1, DDP: 2, FSDP2: 2}
QUIET = {"PYTHONWARNINGS": "ignore"}  # of torch and torchdata


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", RANKS)
def test_each_training_of_the_table_goes_on_with_the_same_bits_after_a_kill(shm: Path, kind: str) -> None:
    cluster, ranks, entries = Cluster(shm), RANKS[kind], len(of_kind(kind))
    job = ("programs/contract_job.py", kind, str(shm))
    killed = cluster.run(ranks, *job, "save", env=QUIET, timeout=190)
    assert [r["entries"] for r in killed.of("saved")] == [entries] * ranks
    assert killed.returncode and not killed.of("end"), killed.log
    restored = cluster.run(ranks, *job, "restore", env=QUIET, timeout=190)
    assert [r["entries"] for r in restored.of("end")] == [entries] * ranks, restored.log
    found = restored.of("compared")
    assert [r for r in found if r["wrong"]] == []
    assert len(found) == (8 if kind == PLAIN else 4) * ranks and min(r["leaves"] for r in found) > 10 * entries
