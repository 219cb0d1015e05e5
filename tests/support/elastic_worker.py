"""What each worker of torchrun does in tests of restarts: it saves states of which all ranks have shards.

``elastic_worker.py OPTIONS`` with OPTIONS in JSON; it takes no name, no directory and no launcher but those of its
environment, as a program of a user does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from records import note
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from waiting import until

import mlflash

OUT = Path(os.environ["OUT"])


def whole_at(step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(step).standard_normal(30_000))


def state_at(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {"weights": distribute_tensor(whole_at(step), mesh, [Shard(0)], src_data_rank=None), "step": step}


def meet_in(file: str) -> None:
    """Initialize as processes that a program has spawned: no launcher has told them anything."""
    rank, size = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE"))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)


def train(last: int, holds_at: int = 0, initializes: bool = True, settings: dict[str, Any] | None = None,
          file: str = "") -> None:  # fmt: skip
    """Restore, and save each step; before `holds_at` the first launch waits for the test to end somebody."""
    if file:
        meet_in(file)
    elif initializes:
        dist.init_process_group("gloo")
    with mlflash.Checkpointer(**(settings or {})) as ckpt:
        if not initializes:
            dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        state = state_at(0, mesh)
        start = ckpt.restore(state)
        is_same = torch.equal(state["weights"].full_tensor(), whole_at(start or 0)) and state["step"] == (start or 0)
        note("restored", rank=rank, size=size, step=start, same=is_same, courier=ckpt.report()["courier"],
             host=os.uname().nodename, mpi="libmpi" in Path("/proc/self/maps").read_text())  # fmt: skip
        for step in range((start or 0) + 1, last + 1):
            if step == holds_at and not start:
                note("holds", rank=rank)
                until((OUT / "go on").exists, "the test to end somebody")
            snapshot = ckpt.save(step, state_at(step, mesh))
            dist.barrier()  # as a step of a training is, which ends by an exception where a rank is lost
            snapshot.wait()
        note("end", rank=rank, steps=ckpt.steps())
    dist.destroy_process_group()


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
