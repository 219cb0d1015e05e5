"""The device to measure: a CUDA GPU, or the CPU to check that the benchmark works."""

from __future__ import annotations

import time
from typing import Any

import torch

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
