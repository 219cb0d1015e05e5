"""Values as JSON, always in the same bytes: the input of a digest.

Keys are sorted by their code points, there are no spaces, texts are UTF-8 and escaped only where necessary, and numbers
are as Python's ``json`` writes them. What JSON does not have is refused.
"""

from __future__ import annotations

import json
import math
from typing import Any


def encode(value: Any) -> bytes:
    """Encode a value. Raises ValueError if JSON does not have it; the text says where it is, and what."""
    try:
        _check(value, "")
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except RecursionError:
        raise ValueError("it contains itself, or has too many levels") from None


def decode(raw: bytes) -> Any:
    """Decode what `encode` returned, and nothing else. Raises ValueError if it is not JSON, or not in this form."""
    try:
        value = json.loads(raw.decode())
        is_same = encode(value) == raw
    except RecursionError:
        raise ValueError("it has too many levels") from None
    if not is_same:
        raise ValueError("it is not as mlflash writes it")
    return value


def _check(value: Any, path: str) -> None:
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path or 'it'} is {value!r}, which JSON does not have")
    elif isinstance(value, str):
        if not value.isascii():
            _check_text(value, path)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check(item, f"{path}[{number}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} of {path or 'it'} is no text")
            _check_text(key, path)
            _check(item, f"{path}.{key}" if path else key)
    else:
        raise ValueError(f"{path or 'it'} is of {type(value)}, which JSON does not have")


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a text in {path or 'it'} is not UTF-8: {text!r}") from None
