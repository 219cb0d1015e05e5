"""Small models in training, sharded by FSDP1 or FSDP2 over some ranks and replicated over others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from emulated import on_node
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard


@dataclasses.dataclass
class Run:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    replicas: Any
    shard: int
    steps: int = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            numbers = torch.Generator().manual_seed(self.steps)
            batch = torch.randn(6, 10, generator=numbers)
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            losses.append(loss.item())
        return losses


class Net(torch.nn.Module):
    """Two layers of sizes that do not divide, and a buffer."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(10, width), torch.nn.Linear(width, 3)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
        return self.last(torch.tanh(self.first(x)))


def fsdp2(replicas: int, shards: int, seed: int = 0, width: int = 13) -> Run:
    torch.manual_seed(seed)
    model = Net(width)
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    for layer in (model.first, model.last, model):
        fully_shard(layer, mesh=mesh)
    return _run(model, mesh)


def fsdp1(replicas: int, shards: int, seed: int = 0, width: int = 13, on_mesh: bool = False) -> Run:
    """``on_mesh``: torch then puts optimizer states together also where a rank has no part of some parameters."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    model = Net(width)
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    if replicas > 1:
        options |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    elif on_mesh:
        options |= {"device_mesh": mesh["shard"]}
    else:
        options |= {"process_group": mesh["shard"].get_group()}
    model.first = FSDP1(model.first, **options)
    return _run(FSDP1(model, **options), mesh)


def _run(model: torch.nn.Module, mesh: DeviceMesh) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Run(model, optimizer, mesh["replica"].get_group(), mesh["shard"].get_local_rank())


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {"job": "smp", **on_node(root), "timeout_s": 30.0} | more
