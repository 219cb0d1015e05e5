"""Asynchronous saves that copy while training goes on: `MemoryWriter(until=)`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp import HalfPlanner, Kept
from mpi4py import MPI
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mlflash import errors

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class Training:
    """A model sharded by FSDP2, large enough to be copied late, and a mean of it that no optimizer has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net: Any = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        fully_shard(self.net, mesh=init_device_mesh("cpu", (SIZE,)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.mean = torch.zeros(256, 64)
        self.steps = 0

    def step(self) -> None:
        self.net(torch.randn(4, 256)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.mean += 1
        self.steps += 1

    @property
    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optim": optim, "mean": self.mean, "steps": self.steps}


@pytest.mark.parametrize(("how", "prepares"), [("thread", True), ("process", True), ("thread", False)])
def test_what_is_loaded_is_the_state_at_the_save_however_early_the_next_step_comes(
    dcp_job: Any, came: list[None], how: str, prepares: bool
) -> None:
    """Also where slots are made by the first save, though one rank alone writes the mean that all of them stage."""
    training = Training()
    training.step()
    if prepares:
        dcp_job.writer.prepare(training.state)
    dcp_job.writer.until = [training.optimizer]
    ended, kept = [], {}
    for _ in range(4):
        kept[training.steps] = Kept.of(training.state)
        ended.append(dcp_job.save(training.state, training.steps, how))
        training.step()  # as early as it may
        ended[-1]()
        assert dcp_job.writer._here._saves._pending[-1].nbytes > 4 * 256 * 256, "what was staged is what is saved"
    assert len(came) >= 2
    for step in (3, 4):
        again = Training()
        again.step()
        kept[step].check(dcp_job.load(again.state, step))


def test_where_something_else_changes_a_tensor_the_save_fails_and_later_ones_copy_at_once_there(
    dcp_job: Any, came: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlflash")
    training = Training()
    training.step()
    dcp_job.writer.prepare(training.state)
    dcp_job.writer.until = [training.optimizer]
    for _ in range(2):
        training.step()
        dcp_job.save(training.state, training.steps, "thread")()
    kept = Kept.of(training.state)
    done = dcp_job.save(training.state, 4, "thread")
    for parameter in training.net.parameters() if RANK == 0 else ():  # the others hear of it
        parameter.to_local().data.mul_(2)
    with pytest.raises((CheckpointException, errors.SaveFailed), match="changed before it was copied"):
        done()
    kept.check(dcp_job.load(Training().state | {"optim": training.state["optim"]}, 3))
    came.clear()
    dcp_job.save(training.state, 5, "thread")
    training.step()
    dist.barrier()
    assert RANK or not came
    assert sum("something other than an optimizer's step" in text for text in caplog.messages) == (RANK == 0)


def test_planners_that_may_read_what_is_not_there_yet_are_refused(dcp_job: Any) -> None:
    training = Training()
    training.step()
    dcp_job.writer.prepare(training.state)
    dcp_job.writer.until = [training.optimizer]
    dcp_job.save(training.state, 1, "thread")()
    training.step()
    with pytest.raises(CheckpointException, match="may read tensors while they are still being copied"):
        dcp_job.save(training.state, 2, "thread", HalfPlanner())()
    dcp_job.writer.until = ()
    dcp_job.save(training.state, 3, "thread", HalfPlanner())()
