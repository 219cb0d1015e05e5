"""Planners of all sorts: their plans cached, their tensors changed, renamed or dropped; and what they may unpickle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp as ours
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp import CachedPlanner, DropPlanner, HalfPlanner, Kept, OtherCachedPlanner, RenamePlanner, spoil, state_at
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

from mlflash.adapters.dcp import SafeLoadPlanner


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


RENAMED = RenamePlanner, lambda state: {"ema": state}
DROPPED = DropPlanner, lambda state: {name: value for name, value in state.items() if name != "buffer"}


@pytest.mark.parametrize(
    ("how", "kind"),
    [("sync", RENAMED), ("thread", RENAMED), ("sync", DROPPED), ("thread", DROPPED), ("process", DROPPED)],
)
def test_a_planner_may_rename_and_drop(dcp_job: Any, how: str, kind: Any) -> None:
    planner, change = kind
    for step in (1, 2, 3):
        state = state_at(step)
        kept = Kept.of(change(state))
        done = dcp_job.save(state, step, how, planner())
        spoil(state)
        found = change(state_at(70))
        assert {name.partition(".")[0] for name in done().state_dict_metadata} == found.keys()
        kept.check(dcp_job.load(found, step))


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
