"""SMP's sharded recipe as its page has it, call by call: a reader by its id, groups of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, Run, fsdp1, fsdp2, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_jobs import COMM, job

from mlflash import errors
from mlflash.adapters import fsdp

RANK = COMM.rank
SAVE_DIR = "/opt/ml/checkpoints"


@contextlib.contextmanager
def sharded(run: Run) -> Iterator[None]:
    with FSDP.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
        yield


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.gate)])
def test_the_sharded_recipe(root: Path, replicas: int) -> None:
    """Two replicas of FSDP1 hold two shards each; on the way back one is sharded over all four, or two as before."""
    checkpoint_id = f"{SAVE_DIR}/tp0_ep0"
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = fsdp1(2, 2)
        run.train(3)
        ranker = fsdp.Ranker(run.model)
        action_rank = ranker.get_rep_rank(RANK) == 0
        assert isinstance(run.model, FSDP)
        process_group = run.model.process_group
        coordinator_rank = min(dist.get_process_group_ranks(process_group))
        checkpoints.maybe_finalize_async_calls(blocking=True, process_group=process_group)
        with sharded(run):
            state_dict = {"model": run.model.state_dict(), "optimizer": FSDP.optim_state_dict(run.model, run.optimizer)}
        if action_rank:
            checkpoints.async_save(state_dict, checkpoint_id=checkpoint_id, process_group=process_group,
                                   coordinator_rank=coordinator_rank)  # fmt: skip
        checkpoints.maybe_finalize_async_calls(blocking=True, process_group=process_group)
        expected = run.train(3)
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = fsdp1(replicas, 4 // replicas, seed=1)
        reader = fsdp.DistributedFileSystemReader(checkpoint_id)
        assert isinstance(run.model, FSDP)
        process_group = run.model.process_group
        coordinator_rank = min(dist.get_process_group_ranks(process_group))
        with sharded(run):
            state_dict = {"model": run.model.state_dict()}
            checkpoints.load(state_dict, storage_reader=reader, process_group=process_group,
                             coordinator_rank=coordinator_rank)  # fmt: skip
            run.model.load_state_dict(state_dict["model"])
            optim_state = checkpoints.load_sharded_optimizer_state_dict(
                model_state_dict=state_dict["model"], optimizer_key="optimizer", storage_reader=reader,
                process_group=process_group,
            )  # fmt: skip
            flattened = FSDP.optim_state_dict_to_load(run.model, run.optimizer, optim_state["optimizer"],
                                                      group=process_group)  # fmt: skip
            run.optimizer.load_state_dict(flattened)
        run.steps = 3
        assert run.train(3) == pytest.approx(expected, rel=1e-5)


def test_replicas_are_found_in_a_model() -> None:
    with job():
        alone, rows = [[0], [1], [2], [3]], init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        assert fsdp.Ranker(Net()).get_rep_groups() == alone, "it may be a stage of a pipeline"
        assert fsdp.Ranker(DistributedDataParallel(Net())).get_rep_groups() == [[0, 1, 2, 3]]
        for make in (fsdp1, fsdp2):
            ranker = fsdp.Ranker(make(2, 2).model)
            assert ranker.get_rep_groups() == [[0, 2], [1, 3]] and ranker.shard == RANK % 2
            assert [ranker.get_rep_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
            assert fsdp.Ranker(make(1, 4).model).get_rep_groups() == alone
        columns = parallelize_module(Net(), rows["tensor"], {"first": ColwiseParallel()})
        assert fsdp.Ranker(columns).get_rep_groups() == alone
        fully_shard(columns, mesh=rows["data"])
        assert fsdp.Ranker(columns).get_rep_groups() == alone


def test_experts_that_no_wrapper_knows_are_no_replicas_unless_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with job():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        of_ddp, of_fsdp = Net(), Net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(of_ddp, ["last.weight", "last.bias"])
        fully_shard(of_fsdp, mesh=mesh, ignored_params=set(of_fsdp.last.parameters()))
        for model in (DistributedDataParallel(of_ddp), of_fsdp):
            caplog.clear()
            assert fsdp.Ranker(model).get_rep_groups() == [[0], [1], [2], [3]]
            assert ("2 parameters, such as" in caplog.text and "last.weight" in caplog.text) == (RANK == 0)
            ranker = fsdp.Ranker(model, part=f"ep{RANK % 2}")
            assert ranker.get_rep_groups() == [[0, 2], [1, 3]] and ranker.shard == RANK % 2


@pytest.mark.parametrize("make", [fsdp2, fsdp1])
def test_ranks_with_other_shards_or_experts_do_not_save_as_one(
    root: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What they hold has the same names, and of each name one would be saved."""
    with job(), fsdp.Checkpoints(**settings(root)) as checkpoints:
        run = make(2, 2)
        run.train(1)
        local = fsdp.local_state_dict(run.model, run.optimizer)
        with pytest.raises(errors.StateError, match="other shards, under the same names"):
            checkpoints.async_save(local, "step-1/local")
        checkpoints.async_save({"experts": {"w": torch.full((3,), float(RANK))}, "a": torch.ones(2)}, "step-1/experts")
        checkpoints.maybe_finalize_async_calls()
        assert ("1 tensors, such as experts.w on ranks 0 and 1, differ" in caplog.text) == (RANK == 0)


def test_an_id_or_a_reader_and_not_both() -> None:
    with job(), fsdp.Checkpoints(enabled=False) as checkpoints:
        reader = fsdp.DistributedFileSystemReader("a")
        for given in ({}, {"checkpoint_id": "a", "storage_reader": reader}):
            with pytest.raises(errors.ConfigError, match="storage_reader="):
                checkpoints.load({}, **given)  # type: ignore[arg-type]
        assert checkpoints.load({}, storage_reader=reader) is None
        with pytest.raises(errors.StepNotFound, match="off"):
            checkpoints.load_sharded_optimizer_state_dict({}, "optimizer", reader)
