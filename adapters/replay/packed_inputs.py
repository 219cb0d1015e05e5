"""Convert a micro-batch and the state that its computation began with to bytes, from which another rank computes.

They may be any nested structure that pickle accepts. Only the elements of a tensor are sent, not the storage around
them, because a batch is often a view of all data. Strides are kept, because they decide which kernels run.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_Packed = tuple[bytes, torch.dtype, tuple[int, ...], tuple[int, ...], str, bool]


def pack(inputs: Any) -> bytes:
    """Give the inputs as bytes. Not collective. You may change the inputs when this returns, but not before.

    Raises:
        Exception: whatever pickle raises for something that it does not accept.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(inputs)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Make the inputs from bytes. Tensors of an accelerator go to the current one of this rank. Not collective.

    Args:
        packed: bytes from another rank of this job. They may run any code, as objects in torch.distributed may.
    """
    return _Unpickler(io.BytesIO(packed)).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> _Packed | None:
        if type(thing) is not torch.Tensor or thing.layout != torch.strided or thing.is_quantized:
            return None
        tensor = thing.detach().resolve_conj().resolve_neg()
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        length = 1 + sum((n - 1) * by for n, by in zip(size, stride, strict=True)) if tensor.numel() else 0
        elements = tensor.as_strided((length,), (1,)).cpu().contiguous().view(torch.uint8)
        is_leaf = thing.requires_grad and thing.is_leaf
        return elements.numpy().tobytes(), tensor.dtype, size, stride, tensor.device.type, is_leaf


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, packed: _Packed) -> torch.Tensor:
        content, dtype, size, stride, device, requires_grad = packed
        if not content:
            return torch.empty_strided(size, stride, dtype=dtype, device=device, requires_grad=requires_grad)
        elements = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).to(device)
        return elements.as_strided(size, stride).requires_grad_(requires_grad)
