"""A plain loop of DDP over a loader that knows its position, for three epochs of four batches."""

from __future__ import annotations

import torch
from job import Run
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from mlflash import Checkpointer, rng


def train(run: Run) -> None:
    """Train to the end of the last epoch, from the newest checkpoint there is."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = TensorDataset(torch.randn(8 * size, 16, generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    ddp, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp(torch.zeros(1, 16)).sum().backward()  # for DDP's buckets
    optimizer.zero_grad()
    torch.manual_seed(100 + rank)
    sampler = StatefulDistributedSampler(data, size, rank)
    loader = StatefulDataLoader(data, 2, sampler=sampler, num_workers=run.workers or 0, generator=torch.Generator())
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": rng(), "epoch": 0}
    with Checkpointer(replicated={"model.*": True, "optimizer.*": True}, enabled=run.enabled,
                      **run.checkpointing) as ckpt:  # fmt: skip
        run.checkpointer = lambda: ckpt
        step = ckpt.restore(state) or 0
        for epoch in range(int(state["epoch"]), 3):  # type: ignore[call-overload]
            state["epoch"] = epoch
            sampler.set_epoch(epoch)
            for (rows,) in loader:
                step += 1
                loss = ddp(rows).square().mean()
                run.loss(step, loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % run.every == 0:
                    ckpt.save(step, state)
    run.end(model, [optimizer])
