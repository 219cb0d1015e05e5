"""Find out from a model which ranks hold the same shard, like SMP's ``state.ranker``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("mlflash")


class Ranker:
    """Knows which ranks hold each shard of a model. Collective over all ranks of torch.distributed.

    Args:
        model: a model of FSDP1, FSDP2, DTensors or DDP. For any other model mlflash assumes that no two ranks hold the
            same. It also does so, with a warning, if some parameters belong to none of these, as experts may.
        part: a name of what this rank holds, such as its checkpoint id (``f"tp{tp}_ep{ep}_fsdp{shard}"``). Ranks with
            the same name are replicas. Default: mlflash finds out from the model.

    Attributes:
        shard: number of this rank's shard, from 0 on, for checkpoint ids such as ``f"tp0_ep0_fsdp{shard}"``.
    """

    def __init__(self, model: torch.nn.Module, part: str | None = None):
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, tuple(sorted(_replicas(model))) if part is None else part)
        alike = [tuple(rank for rank, other in enumerate(said) if other == one) for one in said]
        self._groups = [list(ranks) for ranks in sorted(set(said if part is None else alike))]
        self.shard = next(n for n, ranks in enumerate(self._groups) if dist.get_rank() in ranks)

    def get_rep_groups(self) -> list[list[int]]:
        """Give the ranks that hold each shard. All ranks get the same list, so that all can make the same groups."""
        return [list(ranks) for ranks in self._groups]

    def get_rep_rank(self, rank: int) -> int:
        """Give the number of a rank among the ranks that hold the same shard."""
        return next(ranks.index(rank) for ranks in self._groups if rank in ranks)


def with_other_shards(model: torch.nn.Module) -> set[int]:
    """Give the ranks that hold other shards of this rank's tensors, according to the model. Not collective."""
    return {rank for _, alike, ranks in _places(model) for rank in ranks - alike}


def _replicas(model: torch.nn.Module) -> set[int]:
    """Give all ranks that hold the same as this one, according to the model."""
    found, known = set(range(dist.get_world_size())), set[int]()
    for parameters, alike, _ in _places(model):
        known |= parameters
        found &= alike
    unknown = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if known and unknown and dist.get_rank() == 0:
        log.warning("%d parameters, such as %s, belong to no FSDP, DDP or mesh: mlflash assumes that no two ranks hold "
                    "the same. If some do, say which by Ranker(model, part=...)", len(unknown), unknown[0])  # fmt: skip
    return {dist.get_rank()} if unknown or not known else found


def _places(model: torch.nn.Module) -> Iterator[tuple[set[int], set[int], set[int]]]:
    """Give ids of parameters, the ranks that hold the same part of these, and all ranks that hold a part of these."""
    me = dist.get_rank()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            inside, ranks = module.module.named_parameters(), set(dist.get_process_group_ranks(module.process_group))
            yield {id(param) for name, param in inside if name not in module.parameters_to_ignore}, ranks, ranks
        if isinstance(module, FSDP1) and module.process_group is not None:
            ranks = set(dist.get_process_group_ranks(module.process_group))
            across = getattr(module, "_inter_node_pg", None)  # that of hybrid sharding
            alike = {me} if across is None else set(dist.get_process_group_ranks(across))
            flat = None if module._handle is None else module._handle.flat_param
            its = () if flat is None else (flat, *(flat._params or ()))
            if module.sharding_strategy is ShardingStrategy.NO_SHARD:
                alike = ranks
            yield {id(param) for param in its}, alike, ranks | alike
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            yield {id(parameter)}, _alike(parameter), set(parameter.device_mesh.mesh.flatten().tolist())


def _alike(parameter: DTensor) -> set[int]:
    """Give the ranks of a parameter's mesh that hold the same part of the parameter."""
    mesh, mine = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert mine is not None, "this rank is not in the mesh of its own parameter"
    part = tuple(slice(None) if placement.is_replicate() else place
                 for place, placement in zip(mine, parameter.placements, strict=True))  # fmt: skip
    return set(mesh.mesh[part].flatten().tolist())
