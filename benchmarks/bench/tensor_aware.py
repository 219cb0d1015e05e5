"""A state in the form that Megatron's and NVRx's local checkpoints take."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class TensorAware:
    """A list of tensors that can be removed and inserted again."""

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
