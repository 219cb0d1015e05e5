"""A failure in any phase on any rank: raised on all ranks, the older checkpoint loads, and saving goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dcp import FaultyLoad, FaultySave, loads, spoil, state_at
from mpi4py import MPI
from torch.distributed.checkpoint import CheckpointException

RANK = MPI.COMM_WORLD.rank

NEVER_S = 3600.0  # no wait ends at its deadline: one that is for what does not come would outlast the test


@pytest.fixture
def dcp_job(torch_job: MPI.Comm, started: Callable[..., Any]) -> Iterator[Any]:
    with started(torch_job, timeout_s=NEVER_S) as running:
        yield running


def fails(work: Callable[[], Any], phase: str) -> None:
    with pytest.raises(CheckpointException, match=f"{phase} failed"):
        work()


SAVE_FAULTS = [
    (phase, rank)
    for phase in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
    for rank in (0, 2)
    if phase != "create_global_plan" or rank == 0
]


@pytest.mark.parametrize("how", ["sync", "thread"])
@pytest.mark.parametrize(("phase", "rank"), SAVE_FAULTS)
def test_a_save_that_fails_anywhere_fails_everywhere_and_saving_goes_on(
    dcp_job: Any, phase: str, rank: int, how: str
) -> None:
    for step in (1, 2):
        dcp_job.save(state_at(step), f"step-{step}", how)()
    state = state_at(3)
    fails(lambda: dcp_job.save(state, "step-3", how, FaultySave(phase, rank == RANK))(), phase)
    spoil(state)
    loads(dcp_job, 2, 2)
    for step in (4, 5):
        dcp_job.save(state_at(step), f"step-{step}", how)()
    loads(dcp_job, 5, 5)
    for _ in range(2):
        fails(lambda: dcp_job.save(state_at(30), "step-6", how, FaultySave(phase, rank == RANK))(), phase)
    for step in (6, 7):  # the failed one can be tried again at once
        dcp_job.save(state_at(step), f"step-{step}", how)()
        loads(dcp_job, step, step)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("phase", ["set_up_planner", "finish_plan", "resolve_data"])
def test_a_save_that_fails_in_checkpoint_processes_can_be_tried_again(dcp_job: Any, phase: str, rank: int) -> None:
    for step in (1, 2):
        dcp_job.save(state_at(step), f"step-{step}", "process")()
    for how in ("process", "thread", "sync"):
        fails(dcp_job.save(state_at(30), "step-3", "process", FaultySave(phase, rank == RANK)), phase)
        dcp_job.save(state_at(3), "step-3", how)()
        loads(dcp_job, 3, 3)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_after_a_failed_save_the_checkpointer_does_all_it_can(
    started: Callable[..., Any], torch_job: MPI.Comm, rank: int, strict: bool
) -> None:
    """Ranks that have posted the save and ranks that have not go on together, whatever comes next."""
    verbs: list[Callable[[Any], Any]] = [
        lambda running: running.ckpt.steps(),
        lambda running: running.ckpt.prepare(state_at(0)),
        lambda running: running.ckpt.load(),
        lambda running: running.ckpt.wait(),
        lambda running: running.writer.prepare(state_at(0)),
        lambda running: running.ckpt.save(running.ckpt.last_step + 1, state_at(0)).wait(),
    ]
    with started(torch_job, strict=strict, timeout_s=NEVER_S) as running:
        for verb in verbs:
            for how in ("sync", "thread"):
                step = (running.ckpt.last_step or 0) + 1
                running.save(state_at(step), step, how)()
                fault = FaultySave("finish_plan", rank == RANK)
                fails(running.save(state_at(30), step + 1, "thread", fault), "finish_plan")
                verb(running)
                assert step in running.ckpt.steps() and step + 1 not in running.ckpt.steps()
        fails(lambda: running.save(state_at(30), step + 3, "sync", fault), "finish_plan")  # and it can be closed


@pytest.mark.gate
def test_a_first_save_that_fails_leaves_nothing(dcp_job: Any) -> None:
    for how in ("sync", "thread"):
        for rank in (0, 2):
            fault = FaultySave("finish_plan", rank == RANK)
            with pytest.raises(CheckpointException, match="finish_plan failed"):
                dcp_job.save(state_at(30), "step-3", how, fault)()
    with pytest.raises(CheckpointException, match="no checkpoint in memory"):
        dcp_job.load(state_at(-1))
    dcp_job.save(state_at(3), "step-3")()
    loads(dcp_job, 3, 3)


LOAD_FAULTS = [
    (phase, rank)
    for phase in ("set_up_planner", "create_local_plan", "create_global_plan", "resolve_tensor", "commit_tensor",
                  "load_bytes")
    for rank in (0, 2)
    if phase != "create_global_plan" or rank == 0
]  # fmt: skip


@pytest.mark.parametrize(("phase", "rank"), LOAD_FAULTS)
def test_a_load_that_fails_anywhere_fails_everywhere_and_can_be_tried_again(
    dcp_job: Any, phase: str, rank: int
) -> None:
    dcp_job.save(state_at(1), "step-1")()
    fails(lambda: dcp_job.load(state_at(-1), "step-1", FaultyLoad(phase, rank == RANK)), phase)
    loads(dcp_job, 1, 1)
    dcp_job.save(state_at(2), "step-2")()
    loads(dcp_job, 2, 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_load_whose_plan_fails_at_the_end_on_one_rank_is_raised_on_all_of_them(
    started: Callable[..., Any], torch_job: MPI.Comm, rank: int
) -> None:
    with started(torch_job) as running:
        running.save(state_at(1), "step-1")()
    with pytest.raises(CheckpointException), started(torch_job, timeout_s=20.0) as running:
        running.load(state_at(-1), "step-1", FaultyLoad("finish_plan", rank == RANK))
    with started(torch_job) as running:
        loads(running, 1, 1)
