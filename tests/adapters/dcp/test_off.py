"""DCP where mlflash is off: every way to save succeeds and writes nothing, and a load says that there is nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp import Kept, RenamePlanner
from mpi4py import MPI
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mlflash.adapters.dcp import latest

pytestmark = [pytest.mark.mpi(min_size=4)]


def state_of() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (MPI.COMM_WORLD.size,))
    whole = torch.arange(50.0 * 33).reshape(50, 33)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "plain": torch.full((5,), 2.0), "nested": {"epoch": 7}}


def ours() -> set[threading.Thread]:
    """The threads of mlflash."""
    return {thread for thread in threading.enumerate() if "mlflash" in thread.name}


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
def test_every_save_succeeds_and_writes_nothing(
    torch_job: Any, started: Any, root: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("MLFLASH_DISABLE", "1")
    state, threads = state_of(), ours()
    kept, memory = Kept.of(state), state["plain"].untyped_storage()
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
