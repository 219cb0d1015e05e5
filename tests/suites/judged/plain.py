"""The model that the trainings without a framework train; torch.optim takes five seconds to import."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import mlflash

LAST, EVERY = 5, 2  # steps; each second one is a checkpoint in files


class Training:
    """A model with dropout, and its momenta.

    Attributes:
        state: its tensors, which are the live ones.
    """

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
        self.momenta = {name: torch.zeros_like(param) for name, param in self.model.named_parameters()}
        self.state: dict[str, Any] = {"model": self.model.state_dict(), "momenta": self.momenta}

    def step(self) -> None:
        (self.model(torch.randn(16, 8)) ** 2).mean().backward()
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param -= 0.01 * self.momenta[name].mul_(0.9).add_(param.grad)
                param.grad = None


def settle(checkpointer: mlflash.Checkpointer) -> None:
    """Wait for the drain that runs, so that each run drains the same steps."""
    checkpointer.wait()
    checkpointer.wait_drained()


def begin() -> str:
    """Be in the directory that the first argument names, and return the second: who saves."""
    os.makedirs(sys.argv[1], exist_ok=True)
    os.chdir(sys.argv[1])
    return sys.argv[2]
