"""Rank program for tests that kill and relaunch: a torch training whose saves copy while it goes on."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from meeting import COMM
from records import note
from traps import set_traps

import mlflash
from mlflash.state.flatten import flatten
from mlflash.state.leaves import live_bytes

RANK = COMM.rank


def digest(state: dict[str, Any]) -> str:
    """Of all tensors, bit for bit."""
    whole = hashlib.sha256()
    for value in flatten(state).values:
        whole.update(live_bytes(value))
    return whole.hexdigest()


def train(last: int, traps: Sequence[dict[str, object]] = (), strict: bool = True) -> None:
    """Restore, train to the last step with a save after each, and note what each had to keep."""
    note("start", rank=RANK)
    set_traps(traps, RANK)
    torch.manual_seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with mlflash.Checkpointer(strict=strict) as ckpt:
        for parameter in model.parameters():  # so that the optimizer has its state before it is restored
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        start = ckpt.restore(state) or 0
        note("restored", rank=RANK, step=start, digest=digest(state) if start else "")
        for step in range(start + 1, last + 1):
            model(torch.randn(8, 300, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            note("saved", rank=RANK, step=step, digest=digest(state))
            snapshot = ckpt.save(step, state, until=optimizer)
            assert step == start + 1 or snapshot.later is not None  # the first may have to make room
            if step % 2:
                try:
                    snapshot.wait()
                    note("committed", rank=RANK, step=step)
                except mlflash.errors.SaveFailed as error:
                    if strict:
                        raise
                    note("failed", rank=RANK, step=step, why=str(error))
        ckpt.wait()
        note("end", rank=RANK, steps=ckpt.steps(), digest=digest(state))


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
