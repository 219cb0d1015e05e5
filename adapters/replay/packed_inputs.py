"""A micro-batch and what its computation began with, as bytes that another rank computes from.

Any nested structure that pickle takes. Of a tensor its elements are sent, and none of the storage around them: a batch
is often a view of all data. Strides are kept, as kernels are chosen by them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_Packed = tuple[bytes, torch.dtype, tuple[int, ...], tuple[int, ...], str, bool]


def pack(inputs: Any) -> bytes:
    """Give the bytes. Not collective. Nothing of the inputs may be changed meanwhile, all of it afterwards.

    Raises:
        Exception: whatever pickle raises for something that it does not take.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(inputs)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Make the inputs anew; what was on an accelerator is on the current one of this rank. Not collective.

    Args:
        packed: by another rank of this job, which may run any code, as everywhere in torch.distributed.
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
