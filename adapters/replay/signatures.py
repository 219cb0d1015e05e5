"""What is compared of a gradient: a digest of its bytes, and sums from which the size of a difference follows.

They replace the gradients, so that a replay keeps none: the digest has 8 bytes, and the sums have at most 8 KiB.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

SUMS = 1024


@dataclasses.dataclass(frozen=True)
class Signature:
    """The signature of a tensor.

    Attributes:
        digest: XXH3-64 of its bytes.
        sums: sums over every 1024th element, float64, shape (at most 1024,).
        summands: largest number of elements in a sum.
        largest: largest magnitude of an element.
    """

    digest: bytes
    sums: np.ndarray
    summands: int
    largest: float


def sign(tensor: torch.Tensor) -> Signature:
    """Make the signature of a gradient. Not collective. It only reads the tensor and copies it to the host."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    values = local.detach()
    indices = b""
    if values.is_sparse:
        values = values.coalesce()
        indices, values = _bytes(values.indices()).tobytes(), values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.reshape(-1)
    digest = xxhash.xxh3_64(indices)
    digest.update(_bytes(flat))
    whole = flat.numel() // SUMS * SUMS
    sums = torch.zeros(min(flat.numel(), SUMS), dtype=torch.float64, device=flat.device)
    if whole:
        sums += flat[:whole].view(-1, SUMS).sum(0, dtype=torch.float64)
    sums[: flat.numel() - whole] += flat[whole:]
    largest = torch.linalg.vector_norm(flat, math.inf).item() if flat.numel() else 0.0
    return Signature(digest.digest(), sums.cpu().numpy(), max(1, -(-flat.numel() // SUMS)), largest)


def difference(one: Signature, other: Signature) -> float:
    """Give the difference of two tensors, relative to the largest element of either. 0.0 for the same bits.

    It is the largest difference of two sums, divided by the square root of their number of summands. This equals the
    difference of single elements if there are at most 1024 elements, or if elements differ by chance. A single wrong
    element among many appears smaller by that root. If only one of the two is infinite or NaN somewhere, the difference
    is infinite.
    """
    if one.digest == other.digest:
        return 0.0
    if one.sums.shape != other.sums.shape or one.summands != other.summands:
        return math.inf
    with np.errstate(invalid="ignore"):
        alike = (one.sums == other.sums) | (np.isnan(one.sums) & np.isnan(other.sums))
        apart = np.where(alike, 0.0, np.abs(one.sums - other.sums))
    most = float(np.max(np.where(np.isnan(apart), math.inf, apart), initial=0.0))
    scale = max(one.largest, other.largest) * math.sqrt(one.summands)
    if most == 0.0:
        return 0.0
    return most / scale if math.isfinite(most) and math.isfinite(scale) and scale > 0 else math.inf


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
