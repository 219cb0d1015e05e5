"""A small training that continues where it was. Replace its model, data and loss by yours.

Usage: python train.py --checkpoints DIRECTORY [--seed SEED] [--steps STEPS] [--pause SECONDS]
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import mlflash
from mlflash.adapters.distributed import init_process_group

SIZE = 256
SAVE_EVERY = 5
PRINT_EVERY = 20


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", required=True, help="directory that checkpoints are drained to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    parser.add_argument("--steps", type=int, default=300, help="number of training steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    asked = parser.parse_args()

    init_process_group()  # torch.distributed, with the ranks and the GPUs that srun gave to this job
    rank = torch.distributed.get_rank()
    print(f"rank {rank} is process {os.getpid()} of {socket.gethostname()}", flush=True)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(asked.seed)
    layers = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.GELU(), torch.nn.Linear(SIZE, SIZE))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(asked.seed + 1 + rank)  # each rank has its own data
    # Everything that a step depends on, so that a resumed training ends like an uninterrupted one.
    state = {"model": model.module, "optimizer": optimizer, "rng": mlflash.rng()}

    # replicated: all ranks hold the same model, as under DDP, and each node stores it once.
    with mlflash.Checkpointer(asked.checkpoints, replicated=True) as checkpointer:
        first = checkpointer.restore(state) or 0
        if rank == 0:
            print(f"begins after step {first}; survives the loss of {checkpointer.survives}", flush=True)
        for step in range(first + 1, asked.steps + 1):
            loss = model(torch.randn(8, SIZE, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                checkpointer.save(step, state)
            if rank == 0 and step % PRINT_EVERY == 0:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
            time.sleep(asked.pause)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
