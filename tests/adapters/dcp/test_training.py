"""Training goes on, bit for bit, from what DCP saved, however it was parallel and however it was saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dcp import Kept
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

SIZE = 4
pytestmark = [pytest.mark.mpi(min_size=SIZE)]


class Net(torch.nn.Module):
    """Sizes that four ranks do not divide (two do, for tensor parallelism), and a buffer."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(13, 30), torch.nn.Linear(30, 30)
        self.last = torch.nn.Linear(30, 3, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(x)


def make(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    net: Any = Net(seed)
    if kind == "ddp":
        net = torch.nn.parallel.DistributedDataParallel(net)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        mesh = init_device_mesh("cpu", (SIZE,))
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh,
                                       auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))  # fmt: skip
    elif kind == "fsdp2 and tp":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(net, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        for layer in (net.first, net.second, net):
            fully_shard(layer, mesh=mesh["shard"])
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (SIZE,)) if kind == "fsdp2" else init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard"))  # fmt: skip
        for layer in (net.first, net.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net: Any, optimizer: torch.optim.Optimizer, step: int, steps: int = 1) -> list[float]:
    losses = []
    for number in range(step, step + steps):
        batch = np.random.default_rng((number, dist.get_rank())).standard_normal((4, 13))
        loss = net(torch.from_numpy(batch).float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(net: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim, "epoch": 3, "names": ("a", 1.5)}


@pytest.mark.parametrize("how", ["sync", "thread", "process"])
@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp1", pytest.param("fsdp2", marks=pytest.mark.gate), "hsdp", "fsdp2 and tp"]
)
def test_training_goes_on_from_what_was_saved_while_it_went_on(dcp_job: Any, kind: str, how: str) -> None:
    net, optimizer = make(kind, seed=1)
    train(net, optimizer, 1, steps=2)
    for step in (2, 3):  # the first save makes the slots, the second one copies into them at once
        state = state_of(net, optimizer)
        kept = Kept.of(state)
        done = dcp_job.save(state, f"step-{step}", how)
        after = train(net, optimizer, step + 1)
        done()
    train(net, optimizer, step + 2)

    net, optimizer = make(kind, seed=2)
    state = state_of(net, optimizer) | {"epoch": 0, "names": ()}
    dcp_job.load(state, "step-3")
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    kept.check(state_of(net, optimizer) | {"epoch": state["epoch"], "names": state["names"]})
    assert train(net, optimizer, 4) == after

    # What was loaded is no window into the slot: training has not changed the checkpoint.
    net, optimizer = make(kind, seed=3)
    state = dcp_job.load(state_of(net, optimizer), "step-3")
    kept.check(state)
