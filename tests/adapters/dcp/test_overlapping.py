"""Two asynchronous saves at once: each is whole on all ranks where they are threads.

In a checkpoint process they share one pipe. PyTorch gives one the answer to the other then: it may release a state dict
before mlflash has written it, and the process may end.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp import Hesitant, Kept
from mpi4py import MPI
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mlflash.errors import SaveFailed

pytestmark = [pytest.mark.mpi(min_size=2)]
TIMEOUT_S = 20.0
LATE_S = 0.3
ROUNDS = [(late, is_sharded) for late in ("nobody", "all", "rank 0 model", "rank 0 optim") for is_sharded in (0, 1)]


def state_of(name: str, step: int, is_sharded: int) -> dict[str, Any]:
    """Tensors that all ranks have, and one that they have parts of."""
    state: dict[str, Any] = {f"{name}.plain": torch.full((5,), float(step)), f"{name}.step": step}
    if is_sharded:
        whole = torch.arange(10.0 * 33).reshape(10, 33) * (step + 1) + len(name)
        mesh = init_device_mesh("cpu", (MPI.COMM_WORLD.size,))
        state[f"{name}.sharded"] = distribute_tensor(whole, mesh, [Shard(0)])
    return state


def lateness(late: str, name: str) -> float:
    """How late this rank is with a save: with none, with all, or rank 0 with one and the others with the other."""
    is_late = late == "all" if "rank 0" not in late else (late == f"rank 0 {name}") == (dist.get_rank() == 0)
    return LATE_S if is_late else 0.0


@pytest.mark.gate
def test_two_saves_at_once_in_threads_are_whole(torch_job: MPI.Comm, started: Callable[..., Any]) -> None:
    settings = {"timeout_s": TIMEOUT_S}
    with started(torch_job, job="model", **settings) as model, started(torch_job, job="optim", **settings) as optim:
        both = {"model": model, "optim": optim}
        for step, (late, is_sharded) in enumerate(ROUNDS, 1):
            begun = time.monotonic()
            waits = [running.save(state_of(name, step, is_sharded), f"step-{step}", "thread",
                                  Hesitant(lateness(late, name)))
                     for name, running in both.items()]  # fmt: skip
            for wait in waits:
                wait()
            assert time.monotonic() - begun < TIMEOUT_S, late
            for name, running in both.items():
                loaded = running.load(state_of(name, 0, is_sharded), f"step-{step}")
                Kept.of(state_of(name, step, is_sharded)).check(loaded)


@pytest.mark.gate
def test_a_step_whose_state_dict_was_released_too_early_is_not_committed(
    torch_job: MPI.Comm, started: Callable[..., Any]
) -> None:
    with started(torch_job) as running:
        running.save(state_of("model", 1, 0), "step-1", "thread")()
        is_coordinator = torch_job.rank == 0
        writer, planner = running.writer, DefaultSavePlanner()
        writer.reset("step-2")
        writer.set_up_storage_writer(is_coordinator)
        staged = writer.stage(state_of("model", 2, 0))
        planner.set_up_planner(dict(staged), writer.storage_meta(), is_coordinator)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        results = writer.write_data(planner.finish_plan(plans[0]), planner).wait()
        del staged
        gc.collect()
        if is_coordinator:
            with pytest.raises(SaveFailed, match="released before it was written"):
                writer.finish(metadata, [results])
        torch_job.Barrier()
        with pytest.raises(CheckpointException, match="this step cannot be restored"):
            running.load(state_of("model", 0, 0), "step-2")
        Kept.of(state_of("model", 1, 0)).check(running.load(state_of("model", 0, 0), "step-1"))
