"""Read the pickles of older versions of mlflash, in which `known` had no functions for NumPy's values and files.

In those versions pickle itself wrote such values: it calls functions of NumPy and torch and then sets a state. The
functions of this module read exactly what those versions wrote. `pickles.dump` writes none of it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import known

_OBJECTS = ("O", "O8")


def numpy_dtype(text: str, align: bool, copy: bool) -> np.dtype[Any]:
    """Make a new dtype object, because its byte order is set later."""
    if text not in _OBJECTS:
        known.numpy_dtype(text)
    return np.dtype(text, align=False, copy=True)


def numpy_array(kind: Any, shape: Any, code: Any) -> np.ndarray:
    """Make an empty array. Its content is set later."""
    if kind is not np.ndarray or shape != (0,) or code != b"b":
        raise TypeError("this is not an array as older versions of mlflash wrote it")
    made: np.ndarray = np.ndarray((0,), np.int8)
    return made


def numpy_scalar(dtype: np.dtype[Any], raw: bytes) -> np.generic:
    """Make a NumPy number."""
    return known.numpy_scalar(_of_numpy(dtype).str, raw)


def layout(name: str) -> Any:
    """Give torch's layout of this full name."""
    return known.of_torch(name.removeprefix("torch."))


CALLED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): numpy_dtype,
    ("torch.nn.parameter", "Parameter"): known.parameter,
    ("torch.serialization", "_get_layout"): layout,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): numpy_array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): numpy_scalar for core in ("core", "_core")},
}
"""The functions that replace those that older pickles name."""
FILE = ("_io", "BytesIO")


def torch_value(module: str, name: str) -> Any:
    """Give the dtype of torch that a pickle names. None: the name is not one."""
    try:
        return known.of_torch(name) if module == "torch" else None
    except ValueError:
        return None


def set_state(made: Any, state: Any) -> bool:
    """Set the state of an array, a dtype or a file in memory. Return False if the object is none of these."""
    setters = {np.ndarray: _set_array, io.BytesIO: _set_file}
    setter = _set_dtype if isinstance(made, np.dtype) else setters.get(type(made))
    if setter is None:
        return False
    setter(made, state)
    return True


def _set_dtype(made: Any, state: Any) -> None:
    version, order, *parts, nbytes, alignment, flags = state
    same = nbytes in (-1, made.itemsize) and alignment in (-1, made.alignment) and flags == made.flags
    if version != 3 or order not in ("<", ">", "|", "=") or parts != [None, None, None] or not same:
        raise ValueError(f"this is not the state of a NumPy dtype: {state!r}")
    made.__setstate__(state)


def _set_array(made: Any, state: Any) -> None:
    version, shape, dtype, in_fortran_order, content = state
    if version != 1 or type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"this is not the state of a NumPy array: {state!r}")
    holds_objects = isinstance(dtype, np.dtype) and dtype.char == "O"
    count = len(content) if holds_objects else len(content) / (_of_numpy(dtype).itemsize or 1)
    if type(content) is not (list if holds_objects else bytes) or count != math.prod(shape):
        raise ValueError("an array does not have as much content as its shape needs")
    made.__setstate__((1, shape, dtype, bool(in_fortran_order), content))


def _set_file(made: Any, state: Any) -> None:
    content, position, attributes = state
    if type(content) is not bytes or type(position) is not int or attributes is not None:
        raise ValueError("this is not the state of a file in memory")
    made.__setstate__((content, position, None))


def _of_numpy(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype):
        raise TypeError(f"expected a NumPy dtype, found {type(dtype).__name__}")
    known.numpy_dtype(dtype.str)
    return dtype
