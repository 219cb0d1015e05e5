"""A GPT that Megatron trains is killed in the middle of a save: it goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result

LAST = 6
# Megatron's own warnings are many.
ENV = {"PYTHONWARNINGS": "ignore", "MLFLASH_BLOCK_NBYTES": "65536", "MLFLASH_CHUNK_NBYTES": "65536",
       "TORCH_COMPILE_DISABLE": "1"}  # fmt: skip
TRAINING = ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer", "--global-batch-size", "4"]
LOCAL = ["--save", "unused", "--load", "unused", "--non-persistent-ckpt-type", "local",
         "--non-persistent-save-interval", "2", "--non-persistent-local-ckpt-dir", "unused",
         "--replication", "--replication-jump", "2"]  # fmt: skip
# What Megatron's worker has to do is to wait for the commit.
ASYNC = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
# Half a minute each, most of it until the ranks have imported Megatron; the Slurm test has one that is not async.
SAVES = [LOCAL + ASYNC] + ([LOCAL] if os.environ.get("MLFLASH_FAULTS") == "full" else [])


def run(cluster: Cluster, **spec: Any) -> Result:
    return cluster.run(4, "megatron_worker.py", json.dumps(spec), env=ENV, timeout=110)


def losses(result: Result) -> dict[tuple[int, int], tuple[float, float]]:
    return {(record["rank"], record["step"]): (record["loss"], record["norm"]) for record in result.of("loss")}


@pytest.fixture(scope="module")
def uninterrupted() -> Iterator[dict[tuple[int, int], tuple[float, float]]]:
    root = Path(tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm"))
    result = run(Cluster(root, 2), last=LAST, flags=TRAINING)
    shutil.rmtree(root)
    assert len(losses(result)) == 4 * LAST and len(result.of("end")) == 4, result.log
    yield losses(result)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("saves", SAVES)
def test_pretrain_with_one_line_more_goes_on_where_it_was(
    shm: Path, uninterrupted: dict[tuple[int, int], tuple[float, float]], saves: list[str]
) -> None:
    cluster = Cluster(shm, 2)
    # Step 2 is saved; in the save of step 4 rank 3 dies with its node and its node's memory.
    trap = {"path": ["transfer.sent", "commit.recorded", "transfer.sent"], "action": "wipe", "rank": 3}
    crashed = run(cluster, last=LAST, flags=TRAINING + saves, traps=[trap])
    assert any(shm.glob("out-*/sprung*")) and not crashed.of("end"), crashed.log
    result = run(cluster, last=LAST, flags=TRAINING + saves)
    assert len(result.of("end")) == 4, result.log
    found = losses(result)
    assert min(step for _, step in found) in (3, 5), result.log
    assert losses(crashed) | found == uninterrupted
