"""What is compared of a gradient: a digest of its bytes, and a few sums that say how large a difference is.

Neither takes the memory of a gradient, so that a replay keeps none: the digest has 8 bytes, and the sums at most 8 KiB.
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
    """What is left of a tensor.

    Attributes:
        digest: XXH3-64 of its bytes.
        sums: of every 1024th element, in float64, (at most 1024,).
        summands: how many elements each sum has, at most.
        largest: magnitude of any element.
    """

    digest: bytes
    sums: np.ndarray
    summands: int
    largest: float


def sign(tensor: torch.Tensor) -> Signature:
    """Make the signature of a gradient. Not collective. The tensor is only read, and copied to the host."""
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
    """How far two tensors are from each other, relative to the largest element of either; 0.0 for the same bits.

    It is the largest difference of two sums over the root of the number of their summands: as large as that of single
    elements where there are at most 1024, or where elements differ by chance. One wrong element among many is seen as a
    difference that is smaller by that root. What is infinite or no number in one of them only is infinitely far.
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
