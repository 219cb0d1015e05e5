"""The dtypes that a slot can hold: one table for writing and for reading."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..errors import StateError

TORCH_ITEM_NBYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
         "float4_e2m1fn_x2", "bits8", "bits4x2", "bits2x4", "bits1x8"), 1,
    ),
    "bits16": 2,
}  # fmt: skip
"""The torch dtypes a slot can hold and their bytes per element."""

# What dtype.str of an array without fields can be. Give nothing else to np.dtype(), because it evaluates parts of it.
_ARRAY_DTYPE = re.compile(r"[<>|](?:[biufcSUV]\d{1,9}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)")


def item_nbytes(kind: Any, dtype: Any) -> int:
    """Bytes of an element; a dtype that a slot cannot hold is a ValueError or a LookupError."""
    if kind == "tensor":
        return TORCH_ITEM_NBYTES[dtype]
    if kind != "array":
        raise ValueError(f"unknown kind {kind!r}")
    return array_dtype(dtype).itemsize


def array_dtype(name: Any) -> np.dtype[Any]:
    """The NumPy dtype of a name; a name that a slot cannot hold is a ValueError."""
    if not isinstance(name, str) or not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"dtype {name!r} is not allowed")
    parsed = np.dtype(name)
    if parsed.hasobject or parsed.names is not None or parsed.str != name:
        raise ValueError(f"dtype {name!r} is not allowed")
    return parsed


def array_dtype_name(dtype: np.dtype[Any], path: str) -> str:
    """The name under which a slot holds a NumPy dtype. Raises StateError if it would be read back as another."""
    if dtype.hasobject or dtype.names is not None:
        raise StateError("an array of objects or records cannot be saved", tensor=path, found=dtype)
    name: str = dtype.str
    try:
        is_known = array_dtype(name) == dtype and dtype.metadata is None
    except (ValueError, TypeError):
        is_known = False
    if not is_known:  # for example bfloat16 of ml_dtypes, which says "<V2"
        raise StateError("NumPy knows only the size of this dtype, or it carries metadata: view it as an integer "
                         "dtype of that size", tensor=path, found=repr(dtype))  # fmt: skip
    return name


def torch_dtype_name(dtype: Any, path: str) -> str:
    """The name under which a slot holds a torch dtype. Raises StateError if it has no name."""
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_ITEM_NBYTES:
        raise StateError("torch cannot copy tensors of this dtype: view it as torch.uint8, and save that",
                         tensor=path, found=dtype)  # fmt: skip
    return name
