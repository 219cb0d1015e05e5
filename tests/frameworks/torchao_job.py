"""A training whose optimizer keeps its state in few bits, with FSDP2; a rank may kill itself in the middle.

``torchao_job.py OPTIMIZER KILLED_AT``: 0 is never. The other rank is killed by the launcher. OPTIMIZER is one of
torchao, or "float8": AdamW, with weights that are gathered in 8 bits.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from records import note
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao import optim
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from wrapped import leaves

from mlflash import Checkpointer
from mlflash.adapters.distributed import init_process_group
from mlflash.state.wrapped_tensors import found_in

STEPS = 6


def main() -> None:
    killed_at = int(sys.argv[2])
    torch.compiler.set_stance("force_eager")  # its optimizers compile themselves
    init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    if sys.argv[1] == "float8":
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = getattr(optim, sys.argv[1], torch.optim.AdamW)(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer() as ckpt:
        first = ckpt.restore(state) or 0
        for step in range(first + 1, STEPS + 1):
            data = torch.Generator().manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(4, 64, generator=data)).square().mean().backward()
            optimizer.step()
            if step == killed_at and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.save(step, state).wait()
    held = [*leaves(model.state_dict()), *leaves(optimizer.state_dict()["state"])]
    digest = hashlib.sha256()
    for one in held:
        digest.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    tensors = [*model.parameters(), *(value for its in optimizer.state.values() for value in its.values())]
    wrapped = sum(found_in(tensor, "") is not None for tensor in tensors)
    note("end", first=first, digest=digest.hexdigest(), leaves=len(held), wrapped=wrapped)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
