"""The floats in states, as bits: the largest magnitude in a run of bytes, without a copy and for any dtype.

The magnitudes of floats grow with their bits, read as integers (IEEE 754-2019, 3.4; the OCP 8-bit formats do the same).
So two maxima are enough. The maximum of the bits as signed integers is the largest positive value; the maximum as
unsigned integers is the most negative one. Infinity and NaN are larger than everything finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A format of floats.

    Attributes:
        infinity: bits of infinity; if the format has none, the same as ``nan``.
        nan: the smallest bits, without the sign, that are not a number.
        negative_zero_is_nan: whether the only NaN is what would be -0.
    """

    nbytes: int
    mantissa: int
    bias: int
    infinity: int
    nan: int
    negative_zero_is_nan: bool = False

    @property
    def sign(self) -> int:
        return 1 << (8 * self.nbytes - 1)

    def value(self, bits: int) -> float:
        """The number that bits without a sign stand for."""
        if bits >= self.infinity:
            return float("inf") if bits < self.nan else float("nan")
        exponent, rest = bits >> self.mantissa, (bits & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        return float(rest * 2.0 ** (1 - self.bias) if not exponent else (1 + rest) * 2.0 ** (exponent - self.bias))

    def bits(self, exponent: int) -> int:
        """The bits of two to the power of ``exponent``, or those of the nearest power that the format has."""
        return min(max(1, (exponent + self.bias) << self.mantissa), self.infinity - 1)


_FLOAT64 = FloatFormat(8, 52, 1023, 0x7FF0 << 48, (0x7FF0 << 48) + 1)
_FLOAT32 = FloatFormat(4, 23, 127, 0x7F800000, 0x7F800001)
_FLOAT16 = FloatFormat(2, 10, 15, 0x7C00, 0x7C01)
_ONLY_FINITE = 0x80  # larger than all 8-bit magnitudes: there is no infinity

FORMATS = {
    "float64": _FLOAT64, "float32": _FLOAT32, "float16": _FLOAT16,
    "bfloat16": FloatFormat(2, 7, 127, 0x7F80, 0x7F81),
    "float8_e4m3fn": FloatFormat(1, 3, 7, 0x7F, 0x7F),
    "float8_e5m2": FloatFormat(1, 2, 15, 0x7C, 0x7D),
    "float8_e4m3fnuz": FloatFormat(1, 3, 8, _ONLY_FINITE, _ONLY_FINITE, negative_zero_is_nan=True),
    "float8_e5m2fnuz": FloatFormat(1, 2, 16, _ONLY_FINITE, _ONLY_FINITE, negative_zero_is_nan=True),
    "complex32": _FLOAT16, "complex64": _FLOAT32, "complex128": _FLOAT64,
    "<f2": _FLOAT16, "<f4": _FLOAT32, "<f8": _FLOAT64, "<c8": _FLOAT32, "<c16": _FLOAT64,
}  # fmt: skip
"""By the dtype of an entry, see `state.leaves.Entry`."""


def largest(raw: np.ndarray, form: FloatFormat, bounds: Sequence[int] | np.ndarray) -> np.ndarray:
    """The largest magnitudes in runs of values, as bits: ``(runs,)`` int64.

    Args:
        raw: the bytes, ``(nbytes,)`` uint8, contiguous and aligned to the format.
        bounds: where each run begins and ends, in values, one after the other, ascending: ``(2 * runs,)``. No run is
            empty.
    """
    unsigned = raw.view(f"<u{form.nbytes}")
    signed = unsigned.view(f"<i{form.nbytes}")
    if len(bounds) == 2:
        low, high = bounds
        most, least = signed[low:high].max(keepdims=True), unsigned[low:high].max(keepdims=True)
    else:
        # Every other result is of the bytes between two runs: drop it. The last bound may be the end of the array.
        at = bounds[:-1] if bounds[-1] == unsigned.size else bounds
        most, least = np.maximum.reduceat(signed, at)[::2], np.maximum.reduceat(unsigned, at)[::2]
    least = least.astype(np.uint64)
    negative = np.where(least & np.uint64(form.sign), least & np.uint64(form.sign - 1), np.uint64(0))
    found: np.ndarray = np.maximum(most.astype(np.int64), negative.astype(np.int64))
    if form.negative_zero_is_nan:
        for nth, (low, high) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
            if (unsigned[low:high] == form.sign).any():
                found[nth] = form.nan
    return found


def count(raw: np.ndarray, form: FloatFormat) -> tuple[int, int]:
    """How many of some values are NaN, and how many are infinite."""
    unsigned = raw.view(f"<u{form.nbytes}")
    if form.negative_zero_is_nan:
        return int(np.count_nonzero(unsigned == form.sign)), 0
    magnitudes = unsigned & np.array(form.sign - 1, unsigned.dtype)
    nans = int(np.count_nonzero(magnitudes >= form.nan))
    return nans, int(np.count_nonzero(magnitudes >= form.infinity)) - nans
