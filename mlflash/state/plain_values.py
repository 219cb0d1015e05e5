"""Plain leaves and keys of a state ↔ JSON that keeps Python's types apart.

`KINDS` is the only table: every kind that can be written can be read, and the reader knows no other. Whatever is
written with a tag is read back at once and compared.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import StateError
from .leaves import array_dtype, array_dtype_name

MAX_DEPTH = 200
"""Levels of a tree, and of tuples in a key."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Plain leaves that JSON has no form for: they are written as ``[tag, *texts]``."""

    texts: int
    holds: Callable[[Any], bool]
    encode: Callable[[Any, str], list[Any]]
    decode: Callable[..., Any]


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _encode_scalar(value: Any, path: str) -> list[Any]:
    name = array_dtype_name(value.dtype, path)
    # For NumPy, zeros at the end of a text are padding, and str() drops them, too.
    raw = value.encode(_UTF_32, "surrogatepass") if isinstance(value, np.str_) else value.tobytes()
    return [name, _text(raw)]


def _decode_scalar(name: str, text: str) -> Any:
    dtype, raw = array_dtype(name), base64.b64decode(text)
    if dtype.kind == "U":
        return np.str_(raw[: dtype.itemsize].decode(_UTF_32, "surrogatepass"))
    if dtype.kind == "S":
        return np.bytes_(raw[: dtype.itemsize])
    if dtype.itemsize == 0:
        return np.void(b"")
    return np.frombuffer(raw, dtype=dtype)[0]


def _encode_items(value: tuple[Any, ...], path: str) -> list[Any]:
    return [[encode_key(part, path) for part in value]]


_UTF_32 = "utf-32-le" if np.dtype("U1").str[0] == "<" else "utf-32-be"

KINDS = {
    "i": Kind(1, lambda v: type(v) is int, lambda v, _: [hex(v)], lambda text: int(text, 16)),
    "f": Kind(1, lambda v: type(v) is float, lambda v, _: [repr(v)], float),
    "c": Kind(2, lambda v: type(v) is complex, lambda v, _: [v.real.hex(), v.imag.hex()],
              lambda real, imag: complex(float.fromhex(real), float.fromhex(imag))),
    "b": Kind(1, lambda v: type(v) is bytes, lambda v, _: [_text(v)], base64.b64decode),
    # As bytes, because JSON reads two halves of a character as one character.
    "s": Kind(1, lambda v: type(v) is str, lambda v, _: [_text(v.encode("utf-8", "surrogatepass"))],
              lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass")),
    "n": Kind(2, lambda v: isinstance(v, np.generic), _encode_scalar, _decode_scalar),
    "k": Kind(1, lambda v: isinstance(v, tuple), _encode_items, lambda items: tuple(map(decode_plain, items))),
}  # fmt: skip


def _is_whole_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_AS_JSON: dict[type, Callable[[Any], bool]] = {
    type(None): lambda _: True,
    bool: lambda _: True,
    int: lambda value: -(1 << 53) < value < 1 << 53,
    float: math.isfinite,
    str: _is_whole_text,
}
"""Types that JSON has a form for, and whether it has one for a value."""


def encode_plain(value: Any, path: str) -> Any:
    """Convert a plain leaf to a form that JSON can hold, exactly. Raises StateError if there is no such form."""
    is_json = _AS_JSON.get(type(value))
    if is_json is not None and is_json(value):
        return value
    if not isinstance(value, tuple):
        for tag, kind in KINDS.items():
            if kind.holds(value):
                return _checked(value, [tag, *kind.encode(value, path)], path)
    raise StateError(
        "this leaf cannot be saved; save tensors, arrays, None, bool, int, float, complex, str, bytes, "
        f"containers of them, or objects with state_dict and load_state_dict{_advice(value)}",
        tensor=path or "(the state itself)",
        found=f"{type(value).__module__}.{type(value).__qualname__}",
    )


def _advice(value: Any) -> str:
    """What to do with an object that has a state, under another name than mlflash asks for."""

    def has(name: str) -> bool:
        return callable(getattr(value, name, None))

    if isinstance(value, type):
        return ""
    if has("get_state") and has("set_state"):  # a random generator
        return ": put this one into an object whose state_dict calls get_state() and whose load_state_dict set_state()"
    return ": this one has no load_state_dict" if has("state_dict") else ""


def _checked(value: Any, code: list[Any], path: str) -> list[Any]:
    read = decode_plain(code)
    if type(read) is not type(value) or [code[0], *KINDS[code[0]].encode(read, path)] != code:
        raise StateError("a restore would not read this leaf back as it is: save it as another type",
                         tensor=path or "(the state itself)", expected=f"{type(value)} {value!r}",
                         found=f"{type(read)} {read!r}")  # fmt: skip
    return code


def decode_plain(value: Any) -> Any:
    """Undo :func:`encode_plain`."""
    if not isinstance(value, list):
        return value
    tag, *texts = value
    return KINDS[tag].decode(*texts)


def check_plain(value: Any, depth: int = 0) -> None:
    """Raise ValueError, or what decoding raises, if something read does not have the form of a plain leaf or key."""
    if isinstance(value, dict) or depth > MAX_DEPTH:
        raise ValueError("a plain leaf is not a plain leaf")
    if isinstance(value, list):
        tag, *texts = value
        kind = KINDS.get(tag) if isinstance(tag, str) else None
        if kind is None or kind.texts != len(texts):
            raise ValueError(f"a plain leaf has the unknown tag {tag!r}")
        if tag == "k":
            for part in texts[0]:
                check_plain(part, depth + 1)
        elif not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a plain leaf with the tag {tag!r} is no text")
        decode_plain(value)


def encode_key(key: Any, path: str) -> Any:
    """Convert a dict key (a plain leaf, or a tuple of them) to JSON. Raises StateError if it is lost by that."""
    if type(key) is str and key.isascii():
        return key
    where = f"{path} (a key)"
    try:
        code = ["k", *_encode_items(key, path)] if type(key) is tuple else encode_plain(key, where)
        check_plain(code)
        str(key)  # it must work: names of what is below contain it
        read = decode_plain(code)
        is_retrieved = bool(read == key) and hash(read) == hash(key)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, StateError):  # StateError is a TypeError, too
            raise
        raise StateError(f"this key cannot be saved: {error}", tensor=where, found=type(key)) from None
    if not is_retrieved:
        raise StateError("this key is not equal to itself, so nothing could be found under it again", tensor=where,
                         found=repr(key))  # fmt: skip
    return code
