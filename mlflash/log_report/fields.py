"""Fields of a line, as JSON has them → numbers that make sense, or None."""

from __future__ import annotations

import math
from typing import Any

MOST_RANKS = 10_000_000
LONGEST_TEXT = 2000
_LATEST_S = 253_402_300_800.0  # the year 10000: no calendar has it


def number(value: Any) -> float | None:
    """A time: a number from 0 on, and no NaN."""
    if type(value) not in (int, float) or not 0 <= value < _LATEST_S or math.isnan(value):
        return None
    return float(value)


def whole(value: Any, end: int, first: int = 0) -> int | None:
    """A whole number from ``first`` to below ``end``."""
    return value if type(value) is int and first <= value < end else None


def text(value: Any) -> str:
    """A text; "" where it is null."""
    return "" if value is None else str(value)[:LONGEST_TEXT]
