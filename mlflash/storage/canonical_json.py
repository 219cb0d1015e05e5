"""Values as JSON, always in the same bytes: the input of a digest.

Keys are sorted by their code points, there are no spaces, texts are UTF-8 and escaped only where necessary, and numbers
are as Python's ``json`` writes them. What JSON does not have is refused.
"""

from __future__ import annotations

import json
from typing import Any


def encode(value: Any) -> bytes:
    """Encode a value. Raises ValueError if JSON does not have it, or would give it back as something else."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        if (found := json.loads(text)) != value:
            raise ValueError(f"JSON would give it back as {found!r}")
        return text.encode()
    except TypeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it has too many levels") from None


def decode(raw: bytes) -> Any:
    """Decode what `encode` returned, and nothing else. Raises ValueError if it is not JSON, or not in this form."""
    try:
        value = json.loads(raw.decode())
    except RecursionError:
        raise ValueError("it has too many levels") from None
    if encode(value) != raw:
        raise ValueError("it is not as mlflash writes it")
    return value
