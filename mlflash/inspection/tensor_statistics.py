"""Statistics of a tensor, from its bytes piece by piece, and from several shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import xxhash

from ..state.leaves import Entry

_NUMPY = {
    "bool": "|u1", "uint8": "|u1", "int8": "|i1", "int16": "<i2", "uint16": "<u2", "float16": "<f2",
    "int32": "<i4", "uint32": "<u4", "float32": "<f4", "int64": "<i8", "uint64": "<u8", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16", "bfloat16": "<u2",
}  # fmt: skip
_BY_TORCH = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@dataclasses.dataclass
class Statistics:
    """Statistics of numbers. For complex numbers they are of the magnitudes.

    Attributes:
        count: number of finite values.
        nan, inf, zeros: number of NaN, infinite and zero values.
        low, high, mean: smallest, largest and mean finite value. ``low`` and ``high`` are None if there is none.
        squares: sum of the squared distances from the mean.
        check: XXH3-64 of the bytes.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    low: float | None = None
    high: float | None = None
    mean: float = 0.0
    squares: float = 0.0
    check: int = 0

    @property
    def std(self) -> float | None:
        """Standard deviation of the finite values, for a whole population."""
        return math.sqrt(self.squares / self.count) if self.count else None

    def add(self, values: np.ndarray) -> None:
        """Add more numbers."""
        wide = np.abs(values).ravel() if values.dtype.kind == "c" else values.ravel().astype(np.float64)
        good = wide[np.isfinite(wide)]
        mean = float(good.mean()) if good.size else 0.0
        low, high = (float(good.min()), float(good.max())) if good.size else (None, None)
        self.join(Statistics(good.size, int(np.isnan(wide).sum()), int(np.isinf(wide).sum()), int((good == 0).sum()),
                             low, high, mean, float(np.square(good - mean).sum())))  # fmt: skip

    def join(self, other: Statistics) -> None:
        """Add other statistics.

        Source: Chan, Golub, LeVeque: Updating formulae for computing sample variances, 1979.
        """
        count, apart = max(1, self.count + other.count), other.mean - self.mean
        self.squares += other.squares + apart * apart * self.count * other.count / count
        self.mean += apart * other.count / count
        self.low = min((low for low in (self.low, other.low) if low is not None), default=None)
        self.high = max((high for high in (self.high, other.high) if high is not None), default=None)
        for name in ("count", "nan", "inf", "zeros"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        """Return them as plain values."""
        return {"finite": self.count, "nan": self.nan, "inf": self.inf, "zeros": self.zeros, "min": self.low,
                "max": self.high, "mean": self.mean if self.count else None, "std": self.std,
                "check": f"{self.check:016x}"}  # fmt: skip


def statistics(entry: Entry, pieces: Iterable[np.ndarray]) -> Statistics:
    """Make statistics of the bytes of an entry.

    Args:
        entry: the entry.
        pieces: its bytes, in order, ``(n,)`` uint8 each. If they are not numbers, only the checksum is made.
    """
    found, check = Statistics(), xxhash.xxh3_64()
    for whole in _whole_items(entry, pieces):
        check.update(whole.data)
        values = _values(entry, whole)
        if values is not None and values.size:
            found.add(values)
    found.check = check.intdigest()
    return found


def _whole_items(entry: Entry, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Cut pieces of bytes at the borders of elements."""
    item = entry.nbytes // max(1, math.prod(entry.shape)) or 1
    rest = np.empty(0, dtype=np.uint8)
    for piece in pieces:
        raw = np.concatenate([rest, piece]) if rest.size else np.ascontiguousarray(piece)
        end = raw.size // item * item
        rest = raw[end:]
        if end:
            yield raw[:end]


def _values(entry: Entry, raw: np.ndarray) -> np.ndarray | None:
    """Return the numbers in some bytes. None if they are not numbers."""
    if entry.kind == "array":
        dtype = np.dtype(entry.dtype)
        return raw.view(dtype) if dtype.kind in "biufc" else None
    if entry.dtype in _BY_TORCH:
        import torch

        if not hasattr(torch, entry.dtype):
            return None
        numbers: np.ndarray = torch.from_numpy(raw.copy()).view(getattr(torch, entry.dtype)).float().numpy()
        return numbers
    if entry.dtype not in _NUMPY:
        return None
    values = raw.view(_NUMPY[entry.dtype])
    return (values.astype(np.uint32) << 16).view(np.float32) if entry.dtype == "bfloat16" else values
