"""States to save, and a class that saves them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from mlflash import Checkpointer

MIB = 1 << 20
LARGE_NBYTES = 8 * MIB  # per tensor

State = dict[str, torch.Tensor]


def large_state(nbytes: int) -> State:
    return {f"layer{i}": torch.full((LARGE_NBYTES // 4,), float(i)) for i in range(nbytes // LARGE_NBYTES)}


def bytes_of(state: State) -> Sequence[np.ndarray]:
    return [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in state.values()]


def change(state: State) -> None:
    """Change every tensor of a state, like a training step."""
    torch._foreach_add_(list(state.values()), 1.0)


class Saver:
    """An action that saves a state under the next step, waits until it is committed, and returns the stall."""

    def __init__(self, ckpt: Checkpointer, state: State):
        self._ckpt, self._state, self._step = ckpt, state, 0

    def __call__(self, until: torch.optim.Optimizer | None = None) -> dict[str, float]:
        self._step += 1
        start = time.perf_counter()
        snapshot = self._ckpt.save(self._step, self._state, until=until)
        stall_s = time.perf_counter() - start
        snapshot.wait()
        return {"stall": stall_s}
