"""The loop with dcp.async_save: into memory with mlflash, which drains each second step; or each second into files.

Usage: python dcp_loop.py OUT mlflash|torch
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from plain import EVERY, LAST, Training, begin, settle

import mlflash
from mlflash.adapters.dcp import MemoryReader, MemoryWriter, latest
from mlflash.adapters.distributed import init_process_group


def train(training: Training, newest: str | None, steps: int, reader: Any, writer: Any, before_save: Any) -> None:
    """Load the newest checkpoint by its id; then save each so many steps."""
    state = {**training.state, "rng": torch.get_rng_state(), "step": 0}
    planning = torch.distributed.new_group(backend="gloo")
    if newest is not None:
        dcp.load(state, checkpoint_id=newest, storage_reader=reader, process_group=planning)
        torch.set_rng_state(state["rng"])
    print(f"resumed from step {state['step']}", flush=True)
    for step in range(state["step"] + 1, LAST + 1):
        training.step()
        if step % steps == 0:
            before_save(step)
            state.update(rng=torch.get_rng_state(), step=step)
            name = f"run/step-{step:08d}"
            dcp.async_save(state, checkpoint_id=name, storage_writer=writer(name), process_group=planning).result()


def by_mlflash(training: Training) -> None:
    with mlflash.Checkpointer("run", redundancy="none", drain_every=EVERY) as ckpt:
        writer = MemoryWriter(ckpt)
        newest = latest(ckpt)
        train(training, newest, 1, MemoryReader(ckpt), lambda _: writer,
              lambda step: settle(ckpt) if step % EVERY == 0 else None)  # fmt: skip


def by_torch(training: Training) -> None:
    whole = sorted(path.parent for path in Path("run").glob("step-*/.metadata"))  # PyTorch writes it last
    newest = str(whole[-1]) if whole else None
    reader = None if newest is None else dcp.FileSystemReader(newest)
    train(training, newest, EVERY, reader, dcp.FileSystemWriter, lambda _: None)


if __name__ == "__main__":
    saves_by = begin()
    init_process_group()
    {"mlflash": by_mlflash, "torch": by_torch}[saves_by](training := Training())
    torch.save(training.model.state_dict(), "final.pt")
    torch.distributed.destroy_process_group()
