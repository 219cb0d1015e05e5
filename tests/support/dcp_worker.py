"""Rank program for tests that kill and relaunch: FSDP2 trained with async DCP saves, on any number of ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from records import note
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from traps import set_traps

import mlflash
from mlflash.adapters.dcp import MemoryReader, MemoryWriter, latest
from mlflash.adapters.distributed import init_process_group
from mlflash.launch.launcher_variables import launched


def train(last: int, traps: Sequence[dict[str, object]] = ()) -> None:
    rank = launched(os.environ).rank
    note("start", rank=rank)
    set_traps(traps, rank)  # before there is a courier
    init_process_group(host="127.0.0.1")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 51), torch.nn.Tanh(), torch.nn.Linear(51, 7))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    planning = dist.new_group(backend="gloo")
    with mlflash.Checkpointer() as ckpt:
        writer, reader = MemoryWriter(ckpt), MemoryReader(ckpt)
        step = 0
        newest = latest(ckpt)
        if newest is not None:
            state = _state(model, optimizer, 0)
            dcp.load(state, checkpoint_id=newest, storage_reader=reader, process_group=planning)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            step = state["step"]
        note("restored", step=step, report=ckpt.report())
        future = None
        while step < last:
            step += 1
            batch = torch.randn(12, 40, generator=torch.Generator().manual_seed(step))
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note("loss", step=step, loss=loss.item())
            if future is not None:
                future.result(60)
                note("committed", step=step - 1)
            future = dcp.async_save(_state(model, optimizer, step), checkpoint_id=f"step-{step}",
                                    storage_writer=writer, process_group=planning)  # fmt: skip
        if future is not None:
            future.result(60)
            note("committed", step=step)
        note("end", steps=ckpt.steps())
    dist.destroy_process_group()


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
