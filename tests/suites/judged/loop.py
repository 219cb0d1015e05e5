"""A loop of plain PyTorch: mlflash saves each step and drains each second, or torch.save writes each second.

Usage: python loop.py OUT mlflash|torch
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from plain import EVERY, LAST, Training, begin, settle

import mlflash


def by_mlflash(training: Training) -> None:
    state = {**training.state, "rng": mlflash.rng()}
    with mlflash.Checkpointer("run", redundancy="none", drain_every=EVERY) as ckpt:
        start = ckpt.restore(state) or 0
        print(f"resumed from step {start}", flush=True)
        for step in range(start + 1, LAST + 1):
            training.step()
            if step % EVERY == 0:
                settle(ckpt)
            ckpt.save(step, state)


def by_torch(training: Training) -> None:
    os.makedirs("run", exist_ok=True)
    start, found = 0, sorted(Path("run").glob("step-*.pt"))
    if found:
        saved = torch.load(found[-1])
        for name, tensor in training.momenta.items():
            tensor.copy_(saved["momenta"][name])
        training.model.load_state_dict(saved["model"])
        torch.set_rng_state(saved["rng"])
        start = saved["step"]
    print(f"resumed from step {start}", flush=True)
    for step in range(start + 1, LAST + 1):
        training.step()
        if step % EVERY == 0:
            torch.save({**training.state, "rng": torch.get_rng_state(), "step": step}, f"run/step-{step:08d}.pt")


if __name__ == "__main__":
    {"mlflash": by_mlflash, "torch": by_torch}[begin()](training := Training())
    torch.save(training.model.state_dict(), "final.pt")
