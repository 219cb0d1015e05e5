"""A small training in each layout that torch shards models in: restored into an optimizer without state, on these ranks
and on half of them, it goes on with the bits of one that nothing happened to.

    mpiexec -n 4 python sharded_job.py save       # trains, saves in the middle, and notes how it ended
    mpiexec -n 4 python sharded_job.py restore    # begins in the middle, and notes how it ended; then, on the first
                                                  # two ranks, notes all tensors that are restored
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from digests import digests
from records import note
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_jobs import job

import mlflash

SAVED, LAST = 2, 4
Layout = Callable[[torch.nn.Module], torch.nn.Module]


class Net(torch.nn.Module):
    """Sizes that do not divide by the ranks, unless they are cut into columns."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(10, hidden), torch.nn.Linear(hidden, 3)
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.down(torch.tanh(self.up(x)))
        return found if self.scale is None else found * self.scale.to_local()


def of_fsdp2(model: torch.nn.Module, replicas: int = 1) -> torch.nn.Module:
    size = dist.get_world_size()
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh)
    return model


def of_tp(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.scale = torch.nn.Parameter(distribute_tensor(torch.tensor(1.5), mesh, [Replicate()]))  # 0-d, as steps are
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def of_fsdp1(model: torch.nn.Module, original: bool) -> torch.nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)


LAYOUTS: dict[str, Layout] = {
    "plain": lambda model: model,
    "ddp": torch.nn.parallel.DistributedDataParallel,
    "fsdp1": lambda model: of_fsdp1(model, True),
    "fsdp1-flat": lambda model: of_fsdp1(model, False),
    "fsdp2": of_fsdp2,
    "hsdp": lambda model: of_fsdp2(model, 2),
    "tp": of_tp,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05), amsgrad=True, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}
CASES = [(layout, "adamw") for layout in LAYOUTS] + [("fsdp2", name) for name in OPTIMIZERS if name != "adamw"]
CASES.append(("tp", "sgd"))


def made(layout: str, optimizer: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = LAYOUTS[layout](Net(12 if layout == "tp" else 13))
    if layout == "ddp":  # it puts its buckets in order after the first backward
        model(torch.zeros(1, 10)).sum().backward()
        model.zero_grad()
    return model, OPTIMIZERS[optimizer](model.parameters())


def trained(model: Any, optimizer: Any, first: int, last: int, alike: bool) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        numbers = torch.Generator().manual_seed(step * 100 + (0 if alike else dist.get_rank()))
        loss = model(torch.randn(6, 10, generator=numbers)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def tensors(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters and what the optimizer has of each, by name."""
    found = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        found[name] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{number}/{key}"] = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return found


def whole(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}


def placed(found: dict[str, torch.Tensor]) -> dict[str, Any]:
    meshes = {
        f"{name} mesh": part.device_mesh.mesh.tolist() for name, part in found.items() if isinstance(part, DTensor)
    }
    return digests(found) | meshes


def run(task: str, layout: str, optimizer_name: str, comm: Any) -> None:
    name = f"{layout}-{optimizer_name}"
    settings = {"comm": comm, "job": name, "redundancy": "none", "strict": True}
    model, optimizer = made(layout, optimizer_name, seed=1 if task == "save" else 2)
    alike = layout in ("plain", "tp")
    with mlflash.Checkpointer(**settings) as ckpt:
        state = {"o": optimizer, "m": model}
        if task == "half":
            try:
                assert ckpt.restore(state) == SAVED
            except mlflash.errors.StructureMismatch as error:
                note("refused", case=name, why=str(error))
            else:
                note("half", case=name, tensors=digests(whole(tensors(model, optimizer))))
                trained(model, optimizer, SAVED + 1, LAST, alike)
            return
        if task == "save":
            assert ckpt.restore(state) is None
            trained(model, optimizer, 1, SAVED, alike)
            ckpt.save(SAVED, state).wait()
            note("half", case=name, tensors=digests(whole(tensors(model, optimizer))))
        else:
            assert ckpt.restore(state) == SAVED
        losses = trained(model, optimizer, SAVED + 1, LAST, alike)
        note("ended", case=name, losses=losses, tensors=placed(tensors(model, optimizer)))


if __name__ == "__main__":
    for task, size in [("save", 4)] if sys.argv[1] == "save" else [("restore", 4), ("half", 2)]:
        with job(size) as comm:
            if comm is not None:
                for case in CASES:
                    run(task, *case, comm)
