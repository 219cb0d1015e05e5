"""Tensor-aware state dicts for tests: as Megatron's and NVRx's, without either; and a quantized tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch


@dataclasses.dataclass
class Hole:
    number: int


class Aware:
    """A nested dict whose tensors can be taken out and put back."""

    def __init__(self, state: dict[str, Any]):
        self.state = state
        self.is_hollow = False
        self.moved = 0  # how often tensors were sent back to their devices

    @property
    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        _mapped(self.state, found.append, torch.Tensor)
        return found

    def pop_tensors(self) -> list[torch.Tensor]:
        assert not self.is_hollow
        found: list[torch.Tensor] = []

        def take(tensor: torch.Tensor) -> Hole:
            found.append(tensor)
            return Hole(len(found) - 1)

        self.state, self.is_hollow = _mapped(self.state, take, torch.Tensor), True
        return found

    def insert_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        assert self.is_hollow
        given = list(tensors)
        self.state, self.is_hollow = _mapped(self.state, lambda hole: given[hole.number], Hole), False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self.state = _mapped(self.state, lambda tensor: tensor.clone(), torch.Tensor)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self.moved += 1


def _mapped(value: Any, change: Any, kind: type) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(part, change, kind) for key, part in value.items()}
    if isinstance(value, list):
        return [_mapped(part, change, kind) for part in value]
    return change(value) if isinstance(value, kind) else value


class Quantized(torch.Tensor):
    """A tensor made of two others, as MXFP8 weights are: bytes, and a scale for each row."""

    _raw: torch.Tensor
    _scale: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, scale: torch.Tensor) -> Quantized:
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=torch.bfloat16, device=raw.device)
        tensor._raw, tensor._scale = raw, scale
        return tensor

    def __init__(self, raw: torch.Tensor, scale: torch.Tensor):
        """Made by ``__new__``."""

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["_raw", "_scale"], "rowwise"

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: str, size: Any, stride: Any) -> Quantized:
        assert context == "rowwise"
        return Quantized(parts["_raw"], parts["_scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function}: its bytes are to be copied, not its values")
