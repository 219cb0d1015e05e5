"""Turn JSON fields of a line into valid numbers, or None."""

from __future__ import annotations

import math
from typing import Any

MOST_RANKS = 10_000_000
LONGEST_TEXT = 2000
_LATEST_S = 253_402_300_800.0  # the year 10000, which datetime does not have


def number(value: Any) -> float | None:
    """Return a time: a number from 0 on that is not NaN."""
    if type(value) not in (int, float) or not 0 <= value < _LATEST_S or math.isnan(value):
        return None
    return float(value)


def whole(value: Any, end: int, first: int = 0) -> int | None:
    """Return a whole number from ``first`` to below ``end``."""
    return value if type(value) is int and first <= value < end else None


def text(value: Any) -> str:
    """Return a text; "" for null."""
    return "" if value is None else str(value)[:LONGEST_TEXT]
