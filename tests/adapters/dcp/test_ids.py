"""Checkpoint ids: overwriting, refusing older steps, finding the newest. Where mlflash is off, none means anything."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from dcp import Kept, RenamePlanner, loads, state_at
from emulated import Nodes
from mpi4py import MPI
from torch.distributed.checkpoint import CheckpointException

from mlflash.adapters.dcp import latest


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
def test_the_newest_id_can_be_saved_again(dcp_job: Any, how: str) -> None:
    for value in (1, 2, 3):
        dcp_job.save(state_at(value), "run/step-7", how)()
        loads(dcp_job, value, "other/step-0007")
    assert dcp_job.ckpt.steps() == [7]


def test_the_newest_that_is_named_can_be_loaded_where_a_newer_one_is_damaged_beyond_repair(
    torch_job: MPI.Comm, started: Any, nodes: Nodes
) -> None:
    with started(torch_job) as running:
        for step in (5, 6):
            running.save(state_at(step), step)()
    nodes.damage(6)
    for _ in range(2):  # also at the next relaunch
        with started(torch_job) as running:
            assert latest(running.ckpt) == "step-00000005"
            loads(running, 5, latest(running.ckpt))
            loads(running, 5)


@pytest.mark.parametrize("how", ["sync", "thread"])
def test_an_older_id_is_refused_and_changes_nothing(dcp_job: Any, how: str) -> None:
    for step in (5, 6):
        dcp_job.save(state_at(step), step)()
    for _ in range(2):
        with pytest.raises(CheckpointException, match="steps must grow"):
            dcp_job.save(state_at(50), 5, how)()
    loads(dcp_job, 6)
    dcp_job.save(state_at(7), 7, how)()
    loads(dcp_job, 7)
    with pytest.raises(CheckpointException, match="step 3"):
        loads(dcp_job, 3, "step-3")
    loads(dcp_job, 7)


def test_the_newest_checkpoint_is_found_and_is_what_a_load_without_an_id_gives(dcp_job: Any) -> None:
    assert latest(dcp_job.ckpt) is None
    with pytest.raises(CheckpointException, match="no checkpoint in memory"):
        dcp_job.load(state_at(-1))
    for step in (3, 12):
        dcp_job.save(state_at(step), f"step-{step}")()
        assert latest(dcp_job.ckpt) == f"step-{step:08d}"
        loads(dcp_job, step)
    dcp_job.save(state_at(13), None)()
    assert latest(dcp_job.ckpt) == "step-00000013"
    loads(dcp_job, 13)
    with pytest.raises(CheckpointException, match="step 99"):
        dcp_job.load(state_at(-1), "step-99")


def test_an_id_without_a_number_is_refused_before_anything_begins(dcp_job: Any) -> None:
    with pytest.raises((ValueError, LookupError, RuntimeError), match="must contain the step"):
        dcp_job.save(state_at(1), "newest")
    dcp_job.save(state_at(1), "step-1")()
    loads(dcp_job, 1)


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "mlflash" in thread.name}


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
def test_every_save_succeeds_and_writes_nothing(
    torch_job: Any, started: Any, root: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("MLFLASH_DISABLE", "1")
    state, threads = state_at(2), ours()
    kept, memory = Kept.of(state), state["buffer"].untyped_storage()
    with started(torch_job) as running:
        running.writer.prepare(state)
        for name, planner in (("step-3", None), ("step-3", None), ("best", RenamePlanner()), (None, None)):
            running.save(state, name, how, planner)()
        assert not memory.is_shared(), "torch moves what it sends to another process into shared memory"
        assert latest(running.ckpt) is None
        with pytest.raises(CheckpointException, match="no checkpoint in memory: mlflash is off"):
            running.load(state)
    kept.check(state)
    assert not list(root.glob("node*/*"))
    assert ours() <= threads, "those of the tests before"
