"""A small training whose steps are replayed, and in which one rank computes one bit of one gradient wrongly."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from digests import digest
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_jobs import job

import mlflash
from mlflash.adapters.replay import Replay
from mlflash.errors import ReplayMismatch, StepNotFound

RANK = MPI.COMM_WORLD.rank
STEPS = 6
SIZES = {"0.weight": 32 * 16, "0.bias": 32, "2.weight": 32, "2.bias": 1}
"""Parameters of the model, and how many values each has."""


class Bit:
    """Flips a bit in the gradient of a parameter, once and where it is armed, before gradients are reduced."""

    def __init__(self, parameter: nn.Parameter, index: int, bit: int):
        self.is_armed, self._index, self._bit = False, index, bit
        parameter.register_hook(self._flipped)

    def _flipped(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.is_armed:
            return gradient
        self.is_armed = False
        raw = gradient.contiguous().clone()
        values = raw.view(-1).view(torch.int32)
        values[self._index] ^= -(1 << 31) if self._bit == 31 else 1 << self._bit
        return raw


def training(fault: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train with a fault or none, in a job of all ranks, and give the state after each step. Collective."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    bit = Bit(model.get_parameter(fault.tensor), fault.index, fault.bit) if fault and fault.rank == RANK else None
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters(), lr=0.01)
    check = Replay(wrapped, every=1, on_mismatch="raise")
    for step in range(1, STEPS + 1):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + RANK))
        if bit is not None:
            bit.is_armed = fault.step == step
        check.forward_backward(step, x, lambda net, x: (net(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        yield step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@functools.cache
def clean() -> dict[int, dict[str, Any]]:
    """The state after each step of a training that nothing happens to. Collective, the first time."""
    with job():
        return {step: copy.deepcopy(state) for step, state in training(None)}


def found(options: dict[str, Any], fault: Any) -> dict[str, bool]:
    """Train with the fault, saving each step, and restore what is certified. Collective.

    Args:
        options: of the Checkpointer.
        fault: `corrupt_campaign.Fault`.

    Returns:
        Whether the step was caught before it was saved, its rank was named, and the bits of a clean training came back.
    """
    expected = clean()
    wrong: ReplayMismatch | None = None
    with job():
        with mlflash.Checkpointer(check_values=1.0, certify_after=1, **options) as ckpt:
            try:
                for step, state in training(fault):
                    ckpt.save(step, state).wait()
            except ReplayMismatch as error:
                wrong = error
        state = copy.deepcopy(expected[STEPS])
        with mlflash.Checkpointer(**options) as ckpt:
            try:
                restored = ckpt.restore(state, certified=True)
            except StepNotFound:  # it was too early
                restored = None
    caught = wrong is not None and wrong.step == fault.step and (restored is None or restored < fault.step)
    named = wrong is not None and wrong.rank == fault.rank
    return {"caught": caught, "named": named, "equal": restored is None or digest(state) == digest(expected[restored])}
