"""Two asynchronous saves at once: each is whole on all ranks, or fails on all of them in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp import Hesitant, Kept
from mpi4py import MPI
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

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


@pytest.mark.parametrize("how", ["thread", pytest.param("process", marks=pytest.mark.gate)])
def test_two_saves_at_once_are_whole_or_fail_on_all_ranks_in_time(
    torch_job: MPI.Comm, started: Callable[..., Any], how: str
) -> None:
    settings = {"timeout_s": TIMEOUT_S}
    with started(torch_job, job="model", **settings) as model, started(torch_job, job="optim", **settings) as optim:
        both = {"model": model, "optim": optim}
        for name, running in both.items():
            running.save(state_of(name, 1, 1), "step-1", how)()
        for step, (late, is_sharded) in enumerate(ROUNDS, 2):
            begun = time.monotonic()
            waits = {name: running.save(state_of(name, step, is_sharded), f"step-{step}", how,
                                        Hesitant(lateness(late, name)))
                     for name, running in both.items()}  # fmt: skip
            failed = {}
            for name, wait in waits.items():
                try:
                    wait()
                    failed[name] = False
                except CheckpointException:
                    failed[name] = True
            assert time.monotonic() - begun < TIMEOUT_S, (late, failed)
            # A process has one pipe for both saves, and PyTorch may give one the answer to the other.
            has_failed = any(failed.values())
            assert torch_job.allgather(has_failed) == [has_failed] * torch_job.size, (step, late)
            assert how == "process" or not has_failed, "threads have a group for each save"
            for name, running in both.items() if not has_failed else ():
                loaded = running.load(state_of(name, 0, is_sharded), f"step-{step}")
                Kept.of(state_of(name, step, is_sharded)).check(loaded)
        for name, running in both.items():  # and saving goes on
            running.save(state_of(name, 99, 1), "step-99", how)()
            Kept.of(state_of(name, 99, 1)).check(running.load(state_of(name, 0, 1), "step-99"))
