"""Which ranks hold the same shard of a model: SMP's ``state.ranker``, found out from the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


class Ranker:
    """Replicas of each shard. Collective over all ranks of torch.distributed.

    Args:
        model: FSDP1, FSDP2, of DTensors, or DDP. In any other each rank is taken to hold what no other one holds.

    Attributes:
        shard: the number of this rank's shard, from 0 on, for checkpoint ids such as ``f"tp0_ep0_fsdp{shard}"``.
    """

    def __init__(self, model: torch.nn.Module):
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, tuple(sorted(_replicas(model))))
        self._groups = [list(ranks) for ranks in sorted(set(said))]
        self.shard = next(n for n, ranks in enumerate(self._groups) if dist.get_rank() in ranks)

    def get_rep_groups(self) -> list[list[int]]:
        """The ranks that hold each shard; all ranks have the same list, so that all can make the same groups of it."""
        return [list(ranks) for ranks in self._groups]

    def get_rep_rank(self, rank: int) -> int:
        """The number of a rank among those that hold the same shard."""
        return next(ranks.index(rank) for ranks in self._groups if rank in ranks)


def _replicas(model: torch.nn.Module) -> set[int]:
    """All ranks that hold what this one holds, as far as the model knows."""
    ranks, me = set(range(dist.get_world_size())), {dist.get_rank()}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return set(dist.get_process_group_ranks(module.process_group))
        if isinstance(module, FSDP1) and module.process_group is not None:
            across = getattr(module, "_inter_node_pg", None)  # that of hybrid sharding
            ranks &= me if across is None else set(dist.get_process_group_ranks(across))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            ranks &= _alike(parameter)
    is_known = len(ranks) < dist.get_world_size() or any(isinstance(one, DTensor) for one in model.parameters())
    return ranks if is_known else me


def _alike(parameter: DTensor) -> set[int]:
    """The ranks of a parameter's mesh that hold the same part of it."""
    mesh, mine = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert mine is not None, "this rank is not in the mesh of its own parameter"
    part = tuple(slice(None) if placement.is_replicate() else place
                 for place, placement in zip(mine, parameter.placements, strict=True))  # fmt: skip
    return set(mesh.mesh[part].flatten().tolist())
