"""A model that trains on a device, and its tensors, which are compared bit by bit."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .device import Device, Mark

LAYERS = 8
PER_PARAMETER = 3  # the parameter, and two moments of Adam
MOST_ROWS = 1 << 16  # in a batch


class Training:
    """An MLP with AdamW, whose state has about a given size.

    Args:
        device: where the tensors are.
        nbytes: size of parameters and moments together.
        capturable: whether a CUDA graph may capture its steps.

    Attributes:
        state: model and optimizer, in the form that `save` takes.
    """

    def __init__(self, device: Device, nbytes: int, capturable: bool = False):
        self.device = device
        width = max(64, round((nbytes / 4 / PER_PARAMETER / LAYERS) ** 0.5) // 64 * 64)
        layers: list[Any] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(width, width, bias=False, device=device.torch_device), torch.nn.GELU()]
        self.model = torch.nn.Sequential(*layers)
        more = {"capturable": True} if capturable else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True, **more)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._width = width
        self.resize(16)
        self.step()

    def resize(self, rows: int) -> None:
        self.batch = torch.randn(rows, self._width, device=self.device.torch_device)

    def compute(self) -> None:
        """Run forward and backward."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        self.compute()
        self.optimizer.step()

    def lasting(self, seconds: float) -> float:
        """Enlarge the batch until a step takes at least this long, or the batch is at its limit; gives the time."""
        rows = 16
        while True:
            self.step()
            self.device.sync()
            start = time.perf_counter()
            self.step()
            self.device.sync()
            took = time.perf_counter() - start
            if took >= seconds or rows >= MOST_ROWS:
                return took
            rows = min(MOST_ROWS, rows * 2)
            self.resize(rows)

    def tensors(self) -> list[torch.Tensor]:
        """All parameters and moments, in the same order for any two trainings."""
        found = [parameter.detach() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            found += [value for value in self.optimizer.state[parameter].values() if value.device == parameter.device]
        return found

    def kept(self) -> list[torch.Tensor]:
        """Copies of all of them; waits until the device has made them."""
        copies = [tensor.clone() for tensor in self.tensors()]
        self.device.sync()
        return copies

    def forget(self) -> None:
        """Overwrite all of them with another number."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(-1)
        self.device.sync()

    def differing(self, kept: list[torch.Tensor]) -> int:
        """Count the tensors that differ from these copies."""
        return sum(not torch.equal(one, other) for one, other in zip(self.tensors(), kept, strict=True))


class Waits:
    """Measures how long the device's stream waits in an optimizer's hooks, including those of a `Checkpointer`.

    Make it before any `Checkpointer` adds its hooks. torch calls hooks in their order, an optimizer's own ones last.
    """

    def __init__(self, training: Training):
        self._device = training.device
        self._early: Mark = None
        self._late: Mark = None
        self._handles = [register_optimizer_step_pre_hook(self._begin),
                         training.optimizer.register_step_pre_hook(self._end)]  # fmt: skip

    def seconds(self) -> float:
        """Seconds of wait in the last step, which the device must have finished."""
        return self._device.between(self._early, self._late)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, *args: Any) -> None:
        self._early = self._device.mark()

    def _end(self, *args: Any) -> None:
        self._late = self._device.mark()
