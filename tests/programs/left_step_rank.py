"""A rank of tests/programs/test_left_steps.py: leaves a step at each of its collectives, and does it again.

``left_step_rank.py RANK SIZE KIND PORT``. At the n-th collective of a step the last rank drops its connections, as if
it were lost; the others hear of it in theirs. Then all connect anew, and train on from the state before, in the same
objects.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mlflash.adapters import kept_groups
from mlflash.adapters.kept_groups import BACKEND, ExchangeableGroup
from mlflash.adapters.wrappers import forget_step

RANK, SIZE, KIND, PORT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
PATIENCE = datetime.timedelta(seconds=60)
WIDTH = 32
IN_PARTS = "in parts" in KIND  # two micro-batches, of which the first reduces nothing
COMPILED = ("FSDP2 compiled", "TP compiled")  # from outside; torch.compile of a DDP is another one for each reducer

State = tuple[list[torch.Tensor], dict[Any, dict[str, Any]]]


class Calls:
    """Counts what this rank sends by all groups, and loses the rank at one of them."""

    def __init__(self) -> None:
        self.count, self.lost_at = 0, 0
        found = ExchangeableGroup.connections.fget
        assert found is not None

        def connections(group: ExchangeableGroup) -> dist.ProcessGroup:
            self.count += 1
            if self.count == self.lost_at and RANK == SIZE - 1:
                kept_groups.drop_all()
            return found(group)  # type: ignore[no-any-return]

        ExchangeableGroup.connections = property(connections)  # type: ignore[assignment,method-assign]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(3)]
    model: nn.Module = nn.Sequential(*layers, nn.LayerNorm(WIDTH))  # which the root holds
    if KIND.startswith("DDP"):
        inner: Any = torch.compile(model, backend="aot_eager") if "compiled" in KIND else model
        return DistributedDataParallel(inner, bucket_cap_mb=2 if "compiled" in KIND else 0.02)
    if KIND.startswith("TP"):
        mesh = init_device_mesh("cpu", (SIZE,))
        for layer in layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    if KIND.startswith("HSDP"):
        mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (SIZE,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if IN_PARTS else MixedPrecisionPolicy()
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


class Training:
    def __init__(self) -> None:
        self.model = made()
        self.run = torch.compile(self.model, backend="aot_eager") if KIND in COMPILED else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        data = torch.Generator().manual_seed(number if KIND.startswith("TP") else 1000 * RANK + number)
        self.optimizer.zero_grad()
        for is_last in (False, True) if IN_PARTS else (True,):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(is_last)
                self.model.unshard(async_op=IN_PARTS)
            self.run(torch.randn(8, WIDTH, generator=data)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> State:
        weights = [local(weight).detach().clone() for weight in self.model.parameters()]
        moments = {key: {name: local(value).clone() for name, value in entries.items()}
                   for key, entries in self.optimizer.state_dict()["state"].items()}  # fmt: skip
        return weights, moments

    @torch.no_grad()
    def put_back(self, state: State) -> None:
        weights, moments = state
        for weight, value in zip(self.model.parameters(), weights, strict=True):
            local(weight).copy_(value)
        for key, entries in self.optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                local(value).copy_(moments[key][name])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(left: State, right: State) -> bool:
    return all(map(torch.equal, left[0], right[0])) and all(
        torch.equal(left[1][key][name], right[1][key][name]) for key in left[1] for name in left[1][key]
    )


def left_open() -> list[int]:
    gc.collect()  # as `keep_alive` does: an error that was raised has frames which have the collective
    for thread in [thread for thread in threading.enumerate() if thread.name == "mlflash-dropped"]:
        thread.join(PATIENCE.total_seconds())
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]


def main() -> None:
    calls = Calls()
    kept_groups.register()
    store = dist.TCPStore("127.0.0.1", PORT, None, False, timeout=PATIENCE)
    dist.init_process_group(BACKEND, store=dist.PrefixStore("first", store), rank=RANK, world_size=SIZE)
    training = Training()
    training.step(0)
    before = training.state()
    training.step(1)
    training.step(2)
    after = training.state()
    forget_step(training.model)
    training.put_back(before)
    training.step(1)  # after which DDP has other buckets
    calls.count = 0
    training.step(2)
    count = calls.count
    found, raised, took, opened = [], [], [], []
    for number in range(1, count + 1):
        forget_step(training.model)
        training.put_back(before)
        training.step(1)
        calls.count, calls.lost_at = 0, number
        try:
            training.step(2)
        except Exception as error:  # whatever the version of torch raises
            raised.append(type(error).__name__)
        calls.lost_at = 0
        start = time.perf_counter()
        kept_groups.exchange_all(dist.PrefixStore(f"without {number}", store), PATIENCE)
        forget_step(training.model)
        training.put_back(before)
        took.append(time.perf_counter() - start)
        training.step(1)
        training.step(2)
        found.append(same(training.state(), after))
        opened.append(left_open())
        dist.barrier()  # who goes on, or ends, closes its end of a connection, and this one then its own
    print(json.dumps({"rank": RANK, "collectives": count, "same": found, "raised": raised, "took": took,
                      "opened": opened}), flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
