"""Planners of all sorts: their plans cached, their tensors changed, renamed or dropped; and what they may unpickle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp as ours
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp import CachedPlanner, DropPlanner, HalfPlanner, Kept, OtherCachedPlanner, RenamePlanner, spoil
from mpi4py import MPI
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mlflash.adapters.dcp import SafeLoadPlanner

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = [pytest.mark.mpi(min_size=4)]


def state_at(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(10.0 * 33).reshape(10, 33) * (step + 0.1)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "count": torch.tensor(step),
            "buffer": torch.full((5,), step + 0.1), "epoch": step}  # fmt: skip


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Plans are kept in the class, for as long as the process lives."""
    caches = ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan")
    kept = [getattr(SavePlanner, f"_cached_{name}") for name in caches]
    for cache in kept:
        cache.clear()
    yield
    for cache in kept:
        cache.clear()


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
def test_cached_plans_save_what_is_there_now(dcp_job: Any, root: Path, no_plans: None, how: str) -> None:
    for step in range(1, 6):
        state = state_at(step)
        kept = Kept.of(state)
        path = root / f"disk-{step}"
        dcp.save(state, checkpoint_id=path, storage_writer=dcp.FileSystemWriter(path), planner=OtherCachedPlanner())
        done = dcp_job.save(state, step, how, CachedPlanner())
        spoil(state)
        done()
        kept.check(dcp_job.load(state_at(70), step))
        found = state_at(70)
        dcp.load(found, checkpoint_id=path)
        kept.check(found)


@pytest.mark.parametrize("how", ["sync", "thread"])
def test_a_planner_may_change_tensors(dcp_job: Any, how: str) -> None:
    for step in (1, 2, 3):
        state = state_at(step)
        done = dcp_job.save(state, step, how, HalfPlanner())
        spoil(state)
        metadata = done()
        assert metadata.state_dict_metadata["w"].properties.dtype == torch.float16
        wanted = state_at(step)
        for name in ("w", "buffer"):
            wanted[name] = wanted[name].half()
        exact = state_at(70)
        exact["w"], exact["buffer"] = exact["w"].half(), exact["buffer"].half()
        Kept.of(wanted).check(dcp_job.load(exact, step))
        wanted["w"], wanted["buffer"] = wanted["w"].float(), wanted["buffer"].float()
        Kept.of(wanted).check(dcp_job.load(state_at(70), step))


@pytest.mark.parametrize("how", ["sync", "thread"])
def test_a_planner_may_rename(dcp_job: Any, how: str) -> None:
    for step in (1, 2):
        state = state_at(step)
        kept = Kept.of({"ema": state})
        done = dcp_job.save(state, step, how, RenamePlanner())
        spoil(state)
        assert all(name.startswith("ema.") for name in done().state_dict_metadata)
        kept.check(dcp_job.load({"ema": state_at(70)}))


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
def test_a_planner_may_drop(dcp_job: Any, how: str) -> None:
    for step in (1, 2, 3):
        state = state_at(step)
        kept = Kept.of({name: value for name, value in state.items() if name != "buffer"})
        done = dcp_job.save(state, step, how, DropPlanner())
        spoil(state)
        assert "buffer" not in done().state_dict_metadata
        kept.check(dcp_job.load({name: value for name, value in state_at(70).items() if name != "buffer"}))
        with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: buffer"):
            dcp_job.load(state_at(70))


def test_a_checkpoint_process_refuses_planners_that_change_tensors(dcp_job: Any) -> None:
    for step in (1, 2):
        dcp_job.save(state_at(step), step, "process")()
    for planner in (HalfPlanner(), RenamePlanner()):
        with pytest.raises(CheckpointException, match=r"a planner changes or renames tensors.*: use THREAD"):
            dcp_job.save(state_at(30), 3, "process", planner)()
        Kept.of(state_at(2)).check(dcp_job.load(state_at(70)))
    dcp_job.save(state_at(3), 3, "process")()
    Kept.of(state_at(3)).check(dcp_job.load(state_at(70), 3))


def test_the_safe_planner_loads_data_and_runs_nothing(dcp_job: Any) -> None:
    plain = {"x": 1.5, "t": ("a", None, True), "l": [1, {"b": 2}], "w": torch.ones(3)}
    dcp_job.save({**plain, "sprung": ours.Trap()}, 1)()
    found = {"x": 0.0, "t": (), "l": [0, {"b": 0}], "w": torch.zeros(3)}
    Kept.of(plain).check(dcp_job.load(found, 1, SafeLoadPlanner()))
    ours.sprung.clear()
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        dcp_job.load({**found, "sprung": None}, 1, SafeLoadPlanner())
    assert ours.sprung == []
    found = dcp_job.load({**plain, "sprung": None}, 1)
    assert ours.sprung == ["sprung"] and found["sprung"] is None


@pytest.mark.parametrize("how", ["thread", "process"])
def test_the_first_save_which_finds_no_slot_is_out_of_reach_of_training_too(dcp_job: Any, how: str) -> None:
    state = state_at(1)
    kept = Kept.of(state)
    done = dcp_job.save(state, "step-1", how)
    spoil(state)
    done()
    kept.check(dcp_job.load(state_at(0), "step-1"))
