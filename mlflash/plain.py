"""Plain leaves and keys of a state ↔ JSON that keeps Python's types apart."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from .errors import StateError


def encode_plain(value: Any, path: str) -> Any:
    """Put a plain leaf into a form that JSON can hold, exactly."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 1 << 53 else ["i", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["f", repr(value)]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["b", base64.b64encode(value).decode()]
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return ["n", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise StateError(
        "this leaf cannot be saved; save tensors, arrays, None, bool, int, float, complex, str, bytes, "
        "containers of them, or objects with state_dict and load_state_dict",
        tensor=path or "(the state itself)",
        found=name,
    )


def decode_plain(value: Any) -> Any:
    """Undo :func:`encode_plain`."""
    if not isinstance(value, list):
        return value
    tag, *rest = value
    if tag == "i":
        return int(rest[0], 16)
    if tag == "f":
        return float(rest[0])
    if tag == "c":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if tag == "b":
        return base64.b64decode(rest[0])
    if tag == "k":
        return tuple(decode_plain(v) for v in rest[0])
    return np.frombuffer(base64.b64decode(rest[1]), dtype=np.dtype(rest[0]))[0]


def encode_key(key: Any, path: str) -> Any:
    """Put a dict key (a plain leaf or a tuple of them) into a form that JSON can hold."""
    if isinstance(key, tuple):
        return ["k", [encode_plain(part, path) for part in key]]
    return encode_plain(key, f"{path} (a key)")
