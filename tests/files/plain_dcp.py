"""A checkpoint of plain PyTorch DCP, saved by the processes that `torch.multiprocessing.spawn` starts."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh


def save_sharded(rank: int, directory: Path) -> None:
    """Save by plain DCP, as one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60))  # fmt: skip
    mesh = init_device_mesh("cpu", (2,))
    state = {
        **torch.load(directory / "expected.pt", weights_only=False),
        "sharded": distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(5).view(1, 5), mesh, [Shard(1)]),
        "alike": distribute_tensor(torch.ones(3), mesh, [Replicate()]),
    }
    save(state, checkpoint_id=directory / "theirs")
    dist.destroy_process_group()
