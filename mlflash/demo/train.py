"""The program of one rank: train a small GPT under DDP over gloo, with mlflash.

    mpiexec -n 4 python -m mpi4py -m mlflash.demo.train --steps 20 --folder /tmp/results

Start it again after a failure with the same ``MLFLASH_JOB``, and it continues where it was.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import mlflash

from .model import GPT
from .rank_log import RankLog, memcpy_s
from .same_bits import final_tensors, settle_buckets
from .training_text import Batches

BATCH, CONTEXT = 4, 128
SAVE_EVERY = 2  # steps
_TIMEOUT_S = 60.0


def main() -> None:
    """Train to the last step, from the checkpoint in memory if there is one. Collective over COMM_WORLD."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="for logs and final tensors")
    args = parser.parse_args()

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    rank_log = RankLog(args.folder, rank)
    rank_log.tell("start", pid=os.getpid())
    start_gloo(rank, size)

    torch.manual_seed(args.seed)
    model = GPT(CONTEXT)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    batches = Batches(rank, size, BATCH, CONTEXT, args.seed)
    settle_buckets(ddp, CONTEXT)
    torch.manual_seed(args.seed + 1 + rank)  # each rank has its own dropout

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches, "rng": mlflash.rng()}
    with mlflash.Checkpointer(timeout_s=_TIMEOUT_S) as ckpt:
        restored = ckpt.restore(state)
        report = ckpt.report()
        own_node = report["restored_from"] == report["node"]
        rank_log.tell("ready", restored=restored, own_node=own_node, survives=ckpt.survives,
                     parameters=sum(p.numel() for p in model.parameters()))  # fmt: skip
        snapshots, yardstick = [], []
        for step in range((restored or 0) + 1, args.steps + 1):
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = ddp(*batches.take())
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % SAVE_EVERY == 0:
                snapshots.append(ckpt.save(step, state))
            elif snapshots:  # between saves, so that they do not disturb each other
                yardstick.append(memcpy_s(snapshots[-1].nbytes))
            rank_log.tell("step", step=step, loss=loss.item(), seconds=time.perf_counter() - begin)
        ckpt.wait()
        report = ckpt.report()

    tensors: dict[str, Any] = final_tensors(model, optimizer)
    np.savez(args.folder / f"rank{rank}.npz", **tensors)
    rank_log.tell(
        "done",
        partners=report["partners"],
        transport=report["transport"],
        seconds=report["seconds"],
        saves=[{"stall_s": s.stall_s, "commit_s": s.commit_s, "nbytes": s.nbytes} for s in snapshots],
        memcpy_s=yardstick,
        tensors=len(tensors),
    )
    distributed.destroy_process_group()


def start_gloo(rank: int, size: int) -> None:
    """Start torch.distributed on this machine with the ranks of MPI. Collective over COMM_WORLD."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store, port = None, 0  # the system chooses a free port for rank 0
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        port = store.port
    port = MPI.COMM_WORLD.bcast(port)
    if store is None:
        store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


if __name__ == "__main__":
    main()
