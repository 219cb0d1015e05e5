"""The optimizer's part of a sharded checkpoint, which FSDP1 loads after the model's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata


def to_fill(metadata: Metadata, key: str, process_group: Any) -> dict[str, Any]:
    """Make a flat state dict for a load to fill. Collective over the process group.

    Tensors are sharded over the ranks of the group along their first dimension, as FSDP1 shards them. Tensors with one
    element are whole.

    Args:
        metadata: metadata of the checkpoint.
        key: key of the optimizer in the checkpoint.
        process_group: the ranks that share each tensor.
    """
    ranks = dist.get_process_group_ranks(process_group)
    kind = dist.distributed_c10d._get_pg_default_device(process_group).type
    devices = [f"{kind}:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind for rank in ranks]
    spec: Any = ChunkShardingSpec
    spec = spec(dim=0, placements=[f"rank:{rank}/{device}" for rank, device in zip(ranks, devices, strict=True)])
    mine = devices[dist.get_rank(process_group)]
    found: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if metadata.planner_data[name][0] != key:
            continue
        if isinstance(entry, BytesStorageMetadata):
            found[name] = None
        elif entry.size.numel() == 1:
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=mine)
        else:
            found[name] = sharded_tensor.empty(
                spec, entry.size, dtype=entry.properties.dtype, process_group=process_group
            )
    return found
