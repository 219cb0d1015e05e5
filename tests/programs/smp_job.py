"""SMP's sharded recipe, in the order of its page: one set of replicas saves, with its own process group; all load.

    mpiexec -n 4 python smp_job.py IDS LAST [DIE]

IDS: "page": the id of the page, which says no step; "script": that of AWS's training script, which ends with the step.
Each rank notes what it has loaded, and how it ended. DIE: rank 1 kills itself when this step was committed.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from records import note
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mlflash.adapters import fsdp
from mlflash.adapters.distributed import init_process_group


def digest(model: torch.nn.Module) -> str:
    """A digest of the whole model; its shards are gathered from the ranks of one replica."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole: Any = parameter.full_tensor()  # type: ignore[operator]
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def main(kind: str, last: int, die: int) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(rank // 2)  # replicas begin with different weights: only a load makes them equal
    model = torch.nn.Linear(10, 6)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    process_group = mesh["shard"].get_group()
    coordinator_rank = min(dist.get_process_group_ranks(process_group))
    action_rank = mesh["replica"].get_local_rank() == 0
    name = {"page": "checkpoints/tp0_ep0", "script": "checkpoints/gpt_neox-{}steps"}[kind]
    with fsdp.Checkpoints(timeout_s=30) as checkpoints:
        fsdp.init_optim_state(optimizer)
        state = fsdp.sharded_state_dict(model, optimizer)
        found = checkpoints.load(state, name.removesuffix("-{}steps"), process_group, coordinator_rank,
                                 then=lambda: fsdp.load_sharded_state_dict(model, optimizer, state))  # fmt: skip
        note("loaded", rank, step=found, digest=digest(model))
        for step in range(-1 if found is None else found, last):
            loss = model(torch.full((3, 10), 1.0 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.maybe_finalize_async_calls(blocking=True, process_group=process_group)
            state = fsdp.sharded_state_dict(model, optimizer)
            if action_rank:
                checkpoints.async_save(state, name.format(step + 1), process_group, coordinator_rank)
            if step + 1 == die:
                checkpoints.maybe_finalize_async_calls(blocking=True, process_group=process_group)
                dist.barrier()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.maybe_finalize_async_calls(blocking=True, process_group=process_group)
        note("ended", rank, digest=digest(model))


if __name__ == "__main__":
    init_process_group(host="127.0.0.1")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
    dist.destroy_process_group()
