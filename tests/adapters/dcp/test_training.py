"""Training goes on, bit for bit, from what DCP saved, however it was parallel and however it was saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dcp import Kept
from fsdp_models import Net, Run, fsdp1, fsdp2
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def ddp(seed: int) -> Run:
    torch.manual_seed(seed)
    model = DistributedDataParallel(Net())
    return Run(model, torch.optim.AdamW(model.parameters(), lr=0.05), None, 0)


def fsdp2_and_tensor(seed: int) -> Run:
    torch.manual_seed(seed)
    model: Any = Net(14)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
    for layer in (model.first, model.last, model):
        fully_shard(layer, mesh=mesh["shard"])
    return Run(model, torch.optim.AdamW(model.parameters(), lr=0.05), None, 0)


KINDS = {"ddp": ddp, "fsdp1": lambda seed: fsdp1(1, 4, seed, 30, on_mesh=True), "fsdp2": lambda seed: fsdp2(1, 4, seed),
         "hsdp": lambda seed: fsdp2(2, 2, seed), "fsdp2 and tensor": fsdp2_and_tensor}  # fmt: skip


def state_of(run: Run) -> dict[str, Any]:
    model, optim = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optim": optim, "epoch": 3, "names": ("a", 1.5)}


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp1", pytest.param("fsdp2", marks=pytest.mark.gate), "hsdp", "fsdp2 and tensor"]
)
def test_training_goes_on_from_what_was_saved_while_it_went_on(dcp_job: Any, kind: str, how: str) -> None:
    run = KINDS[kind](1)
    run.train(2)
    for step in (2, 3):  # the first save makes the slots, the second one copies into them at once
        state = state_of(run)
        kept = Kept.of(state)
        done = dcp_job.save(state, f"step-{step}", how)
        after = run.train(1)
        done()
    run.train(1)

    run = KINDS[kind](2)
    state = state_of(run) | {"epoch": 0, "names": ()}
    dcp_job.load(state, "step-3")
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    kept.check(state_of(run) | {"epoch": state["epoch"], "names": state["names"]})
    run.steps = 3
    assert run.train(1) == after

    # What was loaded is no window into the slot: training has not changed the checkpoint.
    kept.check(dcp_job.load(state_of(KINDS[kind](3)), "step-3"))
