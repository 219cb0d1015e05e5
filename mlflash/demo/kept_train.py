"""The training of a process that stays when others are killed: a small GPT under DDP and gloo in `mlflash.keep_alive`.

mlflash run -N 1 --ranks-per-node 2 --keep-alive --spares 1 --job demo -- python -m mlflash.demo.kept_train OPTIONS

``state`` has everything that a step changes, or ``train`` makes it again. The place in the text follows from the step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import mlflash
from mlflash.adapters.distributed import init_process_group

from .model import GPT
from .rank_log import RankLog
from .same_bits import final_tensors, settle_buckets
from .training_text import Batches

BATCH, CONTEXT = 4, 128
SAVE_EVERY = 2  # steps


def main() -> None:
    """Train to the last step, and continue in this process if another one is lost. Collective over all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="for logs and final tensors")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    init_process_group()
    model = GPT(CONTEXT)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    settle_buckets(ddp, CONTEXT)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": mlflash.rng()}

    def train(ckpt: mlflash.Checkpointer, start: int) -> RankLog:
        """Train from a step on, with the current rank of this process."""
        rank, size = distributed.get_rank(), distributed.get_world_size()
        rank_log = RankLog(args.folder, rank)
        rank_log.tell("start", pid=os.getpid(), step=start, time=time.time())
        if start == 0:
            torch.manual_seed(args.seed + 1 + rank)  # each rank has its own dropout
        batches = Batches(rank, size, BATCH, CONTEXT, args.seed)
        batches.skip(start)
        for step in range(start + 1, args.steps + 1):
            optimizer.zero_grad()
            loss = ddp(*batches.take())
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % SAVE_EVERY == 0:
                snapshot = ckpt.save(step, state)
                if step == SAVE_EVERY:
                    snapshot.wait()  # from here on, all ranks can go back to a step
            rank_log.tell("step", step=step, loss=loss.item(), time=time.time())
        ckpt.wait()
        return rank_log

    rank_log = mlflash.keep_alive(train, state)
    np.savez(rank_log.path.with_suffix(".npz"), **final_tensors(model, optimizer))  # type: ignore[arg-type]
    rank_log.tell("done")


if __name__ == "__main__":
    main()
