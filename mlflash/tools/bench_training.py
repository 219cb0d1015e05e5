"""A model that trains on a device, its tensors, which are compared bit by bit, and the device's own copies."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

LAYERS = 8
PER_PARAMETER = 3  # the parameter, and two moments of Adam
MOST_ROWS = 1 << 16  # in a batch

Mark = Any
"""A moment on the device: a CUDA event, or a time in seconds on the CPU."""


class Device:
    """The device that is timed.

    Args:
        name: torch's name of it, "cuda" or "cpu".
    """

    def __init__(self, name: str):
        self.torch_device = torch.device(name)
        self.is_cuda = self.torch_device.type == "cuda"

    def sync(self) -> None:
        """Wait until the device has finished all work that was submitted."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def mark(self) -> Mark:
        """Record the moment when the current stream gets here."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, early: Mark, late: Mark) -> float:
        """Seconds between two moments, both in the past."""
        return float(early.elapsed_time(late)) / 1e3 if self.is_cuda else float(late - early)

    def warm_host(self, nbytes: int) -> torch.Tensor:
        """Host memory whose pages exist already, pinned for CUDA. Shape ``(nbytes,)``."""
        room = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)
        return room.fill_(1)

    def says(self) -> dict[str, Any]:
        """Describe the device, for the header."""
        if not self.is_cuda:
            return {"device": "cpu (a dry run: no device is measured)"}
        about = torch.cuda.get_device_properties(self.torch_device)
        return {"device": about.name, "device GiB": round(about.total_memory / 2**30), "CUDA": torch.version.cuda}


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


class Copies:
    """Times the device's own copies to and from pinned memory. All tensors are copied together, in one stream.

    Args:
        device: the device to time.
        tensors: tensors on it.
    """

    def __init__(self, device: Device, tensors: list[torch.Tensor]):
        self._device, self._tensors = device, [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        self.nbytes = sum(tensor.numel() for tensor in self._tensors)
        self._room = device.warm_host(self.nbytes).split([tensor.numel() for tensor in self._tensors])
        self._targets = [torch.empty_like(tensor) for tensor in self._tensors]

    def to_host(self) -> float:
        """Seconds of a copy to the host."""
        return self._timed(list(self._room), self._tensors)

    def to_device(self) -> float:
        """Seconds of a copy to the device."""
        return self._timed(self._targets, list(self._room))

    def _timed(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
        self._device.sync()
        start = self._device.mark()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        end = self._device.mark()
        self._device.sync()
        return self._device.between(start, end)
