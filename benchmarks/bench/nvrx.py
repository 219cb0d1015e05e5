"""Sets up NVRx's local checkpoints as its users must, and makes them work without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Aware:
    """A list of tensors that can be removed and inserted again. NVRx needs a state in this form."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.shapes = [tensor.shape for tensor in tensors]

    @property
    def is_hollow(self) -> bool:
        return not self.tensors

    def pop_tensors(self) -> list[torch.Tensor]:
        taken, self.tensors = self.tensors, []
        return taken

    def insert_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def init_tensors(self) -> None:
        self.tensors = [torch.empty(shape) for shape in self.shapes]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Copy the tensors, as NVRx does from a GPU."""
        self.tensors = [tensor.to("cpu", copy=True) for tensor in self.tensors]

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Do nothing: the tensors stay where they are."""


class _OnCpu(TorchFunctionMode):
    """Uses the CPU instead of "cuda", through which NVRx sends replicas."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let NVRx work without a GPU. If there is a GPU, change nothing."""
    if torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    with _OnCpu():
        yield
