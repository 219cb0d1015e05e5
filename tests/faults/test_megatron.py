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
from frameworks.test_keep_alive import check
from harness import Cluster, Result
from waiting import until

LAST = 6
# Megatron's own warnings are many.
ENV = {"PYTHONWARNINGS": "ignore", "MLFLASH_TEST_BLOCK_NBYTES": "16384"}  # fmt: skip
TRAINING = ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer", "--global-batch-size", "4"]
LOCAL = ["--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "2",
         "--non-persistent-local-ckpt-dir", "run", "--replication", "--replication-jump", "2"]  # fmt: skip
# Megatron's worker waits for the commit of local checkpoints, and writes persistent ones.
ASYNC = [*LOCAL, "--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]


def run(cluster: Cluster, env: dict[str, str] | None = None, **spec: Any) -> Result:
    """Train as the page on Megatron starts it."""
    named = {**ENV, **(env or {})}
    return cluster.run(4, "faults/megatron_worker.py", json.dumps(spec), env=named, timeout=200, launcher="torchrun")


def losses(result: Result) -> dict[tuple[int, int], tuple[float, float]]:
    return {(record["rank"], record["step"]): (record["loss"], record["norm"]) for record in result.of("loss")}


@pytest.fixture(scope="module")
def uninterrupted() -> Iterator[dict[tuple[int, int], tuple[float, float]]]:
    root = Path(tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm"))
    result = run(Cluster(root, 2), last=LAST, flags=TRAINING)
    shutil.rmtree(root)
    assert len(losses(result)) == 4 * LAST and len(result.of("end")) == 4, result.log
    yield losses(result)


@pytest.mark.timeout(600)
def test_pretrain_with_one_line_more_goes_on_where_it_was(
    shm: Path, uninterrupted: dict[tuple[int, int], tuple[float, float]]
) -> None:
    """Its local checkpoints are async, with persistent ones besides; the Slurm test has one that is not async."""
    cluster, path = Cluster(shm, 2), str(shm / "pfs")
    flags = [*TRAINING, *ASYNC, "--save", path, "--load", path, "--save-interval", "3"]
    # Step 2 is saved; in the save of step 4 rank 3 dies with its node and its node's memory.
    trap = {"path": ["transfer.sent", "commit.recorded", "transfer.sent"], "action": "wipe", "rank": 3}
    crashed = run(cluster, last=LAST, flags=flags, traps=[trap])
    assert any(shm.glob("out-*/sprung*")) and not crashed.of("end"), crashed.log
    # The persistent one of step 3 counts from when Megatron has written this, which may be after the node died.
    tracker = shm / "pfs" / "latest_checkpointed_iteration.txt"
    newest = int(tracker.read_text()) if tracker.exists() else 0
    assert newest in (0, 3)
    result = run(cluster, last=LAST, flags=flags)
    assert len(result.of("end")) == 4, result.log
    assert result.with_mpi == [False] * 4, "a trainer has loaded MPI"
    found = losses(result)
    # The local one that all ranks have, or the persistent one where that is newer.
    assert (first := min(step for _, step in found)) in {max(2, newest) + 1, 5}, (first, newest, result.log)
    assert losses(crashed) | found == uninterrupted


@pytest.mark.timeout(600)
def test_the_other_ranks_stay_in_their_processes(shm: Path, tmp_path: Path) -> None:
    """Tensor and data parallelism, and a distributed optimizer."""
    check("megatron", 4, (2, 0), shm, tmp_path, last=30)


@pytest.mark.timeout(600)
def test_megatron_alone_goes_on_from_its_drained_directory(
    shm: Path, uninterrupted: dict[tuple[int, int], tuple[float, float]]
) -> None:
    """EasyCkpt's lines, and what they write to storage is Megatron's own."""
    cluster, folder = Cluster(shm, 2), shm / "pfs"
    flags = [*TRAINING, "--save", str(folder), "--load", str(folder)]
    easy = {"save_mem_interval": 100, "save_storage_interval": 1, "max_ckpt_num": 2, "in_background": True}
    first = run(cluster, last=4, flags=flags, easy=easy)
    assert len(first.of("end")) == 4, first.log
    tracker = folder / "latest_checkpointed_iteration.txt"
    until(lambda: tracker.exists() and tracker.read_text() == "4", lambda: f"the last one: {os.listdir(folder)}")
    assert sorted(path.name for path in folder.glob("iter_*"))[-2:] == ["iter_0000003", "iter_0000004"]
    second = run(cluster, {"MLFLASH_DISABLE": "1"}, last=LAST, flags=flags)
    assert {step for _, step in losses(second)} == {5, 6}, second.log
    assert losses(first) | losses(second) == uninterrupted


@pytest.mark.timeout(600)
def test_switched_off_it_goes_on_from_what_megatron_wrote(
    shm: Path, uninterrupted: dict[tuple[int, int], tuple[float, float]]
) -> None:
    cluster, path, env = Cluster(shm, 2), str(shm / "pfs"), {"MLFLASH_DISABLE": "1"}
    flags = [*TRAINING, *LOCAL, "--save", path, "--load", path, "--save-interval", "3"]
    first = run(cluster, env, last=4, flags=flags)
    assert len(first.of("end")) == 4, first.log
    newest = int((shm / "pfs" / "latest_checkpointed_iteration.txt").read_text())
    assert newest in (3, 4)  # Megatron writes one where it exits
    assert not cluster.slot_files() and not (shm / "run").exists()
    second = run(cluster, env, last=LAST, flags=flags)
    assert len(second.of("end")) == 4 and min(step for _, step in losses(second)) == newest + 1, second.log
    assert losses(first) | losses(second) == uninterrupted


@pytest.mark.timeout(600)
def test_the_last_iteration_is_on_disk_or_a_line_tells(
    shm: Path, uninterrupted: dict[tuple[int, int], tuple[float, float]]
) -> None:
    """At --exit-interval Megatron takes a local checkpoint for the last one: Megatron-Bridge#5922."""
    cluster, folder = Cluster(shm, 2), shm / "pfs"
    flags = [*TRAINING, *LOCAL, "--save", str(folder), "--load", str(folder), "--train-iters", str(LAST)]
    exits = run(cluster, last=4, flags=flags)
    assert len(exits.of("end")) == 4 and not [*folder.glob("iter_*")], exits.log
    assert exits.log.count("iteration 4 is in memory only: the newest on disk is none") == 1, exits.log
    ends = run(cluster, last=1000, flags=flags)
    assert losses(exits) | losses(ends) == uninterrupted, ends.log
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(LAST)
    assert "in memory only" not in ends.log


@pytest.mark.timeout(400)
@pytest.mark.gate
def test_megatron_bridge_goes_on_from_memory_with_the_same_bits(shm: Path) -> None:
    """Its own train step; all ranks are killed, and a node is lost besides."""
    cluster, program = Cluster(shm), ["faults/bridge_job.py", str(shm / "bridge"), str(LAST)]
    killed = cluster.run(2, *program, "5", env=ENV, launcher="torchrun", timeout=150)
    assert {step for _, step in losses(killed)} == {1, 2, 3, 4, 5}, killed.log
    cluster.wipe(1)
    again = cluster.run(2, *program, env=ENV, launcher="torchrun", timeout=150)
    found = losses(again)
    assert {step for _, step in found} == {4, 5, LAST}, again.log
    assert {key: found[key] for key in found if key[1] < LAST} == {
        key: loss for key, loss in losses(killed).items() if key[1] > 3
    }
    assert not [*(shm / "bridge").glob("iter_*")], "it was in memory only"
    assert again.log.count(f"iteration {LAST} is in memory only") == 1, again.log
