"""SMP's local and sharded recipes for replicas, and for tensor and expert parallelism, one after the other, on 4 ranks.

    mpiexec -n 4 python smp_parallel_job.py LAST [DIE]

Each kind has a model of its own, and a checkpoint id with the ranks of its parallelism in it, as on the page. Each rank
notes, of each kind, which step it has loaded, and how it ended beside a training that nobody has killed. DIE: rank 1
kills itself at this step, while it is being saved.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from records import note
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mlflash.adapters import fsdp
from mlflash.adapters.distributed import init_process_group


class Experts(torch.nn.Module):
    """A layer that all ranks have alike, and an expert that only the ranks of one expert rank have."""

    def __init__(self, seed: int, expert: int):
        super().__init__()
        torch.manual_seed(seed)
        self.shared = torch.nn.Linear(8, 8)
        torch.manual_seed(seed + 100 + expert)
        self.expert = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.expert(torch.tanh(self.shared(x)))
        return out


@dataclasses.dataclass
class Run:
    """A model in training.

    Attributes:
        part: of the model that this rank has: a checkpoint id.
        is_local: local or sharded state dicts.
        data: number of the batches that this rank sees.
        mean: groups whose ranks average the gradients of some parameters.
        group: the ranks that save together, where the model does not say it; None: all.
        saves: whether this rank has a part in saving; each has in loading.
    """

    model: torch.nn.Module
    part: str
    is_local: bool
    data: int
    mean: Callable[[], list[tuple[torch.nn.Module, Any]]] = list
    group: Any = None
    saves: bool = True

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, number: int) -> None:
        torch.manual_seed(1000 * number + self.data)
        found: Any = self.model(torch.randn(4, 8))
        found.square().mean().backward()
        for module, group in self.mean():
            for parameter in module.parameters():
                grad: Any = parameter.grad
                grad = grad.to_local() if isinstance(grad, DTensor) else grad
                dist.all_reduce(grad, group=group)
                grad /= dist.get_world_size(group)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        make = fsdp.local_state_dict if self.is_local else fsdp.sharded_state_dict
        return make(self.model, self.optimizer)

    def put(self, state: dict[str, Any]) -> None:
        load = fsdp.load_local_state_dict if self.is_local else fsdp.load_sharded_state_dict
        load(self.model, self.optimizer, state)


def held(run: Run) -> str:
    """A digest of what this rank has: weights and moments."""
    parameters = [*run.model.parameters()]
    return digest([parameters, [run.optimizer.state[parameter] for parameter in parameters]])


def tensors(seed: int, replicas: int, is_sharded: bool) -> tuple[Any, Any]:
    """Two layers, the first cut by columns and the second by rows, over half of the ranks; and the mesh."""
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 8, bias=False))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if is_sharded:
        fully_shard(model, mesh=mesh["data"])
    return model, mesh


def tensor_alone(seed: int) -> Run:
    """Local, tensor parallelism, each shard on two ranks."""
    model, mesh = tensors(seed, 2, False)
    data, tensor = (mesh[name].get_local_rank() for name in ("data", "tensor"))
    part = f"tp{tensor}_ep0_fsdp0"
    return Run(model, part, True, data, lambda: [(model, mesh["data"].get_group())], group_of(model, part))


def tensor_and_fsdp_local(seed: int) -> Run:
    """Local, tensor parallelism and FSDP2: each rank has a shard that no other one has."""
    model, mesh = tensors(seed, 2, True)
    data, tensor = (mesh[name].get_local_rank() for name in ("data", "tensor"))
    return Run(model, f"tp{tensor}_ep0_fsdp{data}", True, data, group=group_of(model))


def tensor_and_fsdp(seed: int) -> Run:
    """Sharded, tensor parallelism and FSDP2, by all ranks together."""
    model, mesh = tensors(seed, 2, True)
    return Run(model, "all", False, mesh["data"].get_local_rank())


def replicas_of_fsdp(seed: int) -> Run:
    """Sharded by FSDP2 over two ranks; of two such replicas the first saves, and both load."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 6)
    fully_shard(model, mesh=mesh)
    replica = mesh["replica"].get_local_rank()
    return Run(model, "tp0_ep0", False, dist.get_rank(), group=mesh["shard"].get_group(), saves=replica == 0)


def experts_alone(seed: int) -> Run:
    """Local, an expert on ranks 0 and 2 and another one on 1 and 3, beside a layer that all have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = Experts(seed, mesh["expert"].get_local_rank())
    part, data = f"tp0_ep{mesh['expert'].get_local_rank()}_fsdp0", mesh["data"].get_group()
    mean = lambda: [(model.shared, None), (model.expert, data)]  # noqa: E731
    return Run(model, part, True, dist.get_rank(), mean, group_of(model, part))


def experts_and_fsdp(seed: int) -> Run:
    """Sharded by FSDP2 over two ranks, which have an expert of their own; the other two have another one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    model = Experts(seed, mesh["expert"].get_local_rank())
    for module in (model.shared, model.expert, model):
        fully_shard(module, mesh=mesh["shard"])
    part = f"tp0_ep{mesh['expert'].get_local_rank()}"
    return Run(model, part, False, dist.get_rank(), lambda: [(model.shared, mesh["expert"].get_group())],
               mesh["shard"].get_group())  # fmt: skip


KINDS = (tensor_alone, tensor_and_fsdp_local, tensor_and_fsdp, replicas_of_fsdp, experts_alone, experts_and_fsdp)


def group_of(model: torch.nn.Module, part: str | None = None) -> Any:
    """The page's loop: the group of the ranks that hold the same."""
    ranker = fsdp.Ranker(model, part)
    return [dist.new_group(ranks) for ranks in ranker.get_rep_groups()][ranker.shard]


def main(last: int, die: int) -> None:
    rank, found = dist.get_rank(), dict[str, int | None]()
    runs = {make.__name__: make(seed=0 if die >= 0 else 1) for make in KINDS}  # only a load makes the weights right
    with fsdp.Checkpoints(timeout_s=30) as checkpoints:
        for name, run in runs.items():
            fsdp.init_optim_state(run.optimizer, skip_empty_param=True)
            state = run.state()
            reader = fsdp.DistributedFileSystemReader(f"{name}/{run.part}")
            found[name] = checkpoints.load(state_dict=state, process_group=run.group, storage_reader=reader,
                                           then=lambda run=run, state=state: run.put(state))  # fmt: skip
            note("loaded", rank, kind=name, step=found[name])
        for step in range(last):
            for name, run in runs.items():
                if found[name] is not None and step <= found[name]:
                    continue
                run.step(step)
                checkpoints.maybe_finalize_async_calls(blocking=True, process_group=run.group)
                state = run.state()
                if run.saves:
                    checkpoints.async_save(state, checkpoint_id=f"{name}/{run.part}", process_group=run.group)
            if step == die and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        for run in runs.values():
            checkpoints.maybe_finalize_async_calls(blocking=True, process_group=run.group)
    for make in KINDS:
        alone = make(seed=0)
        fsdp.init_optim_state(alone.optimizer, skip_empty_param=True)
        for step in range(last):
            alone.step(step)
        note("ended", rank, kind=make.__name__, digest=held(runs[make.__name__]), alone=held(alone))


if __name__ == "__main__":
    init_process_group(host="127.0.0.1")
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
    dist.destroy_process_group()
