"""Numbers, times and names as the page writes them."""

from __future__ import annotations

import datetime
import math

from ..human_readable.units import show_bytes, show_seconds

__all__ = ["clock", "day", "lasted", "show_bytes", "show_seconds", "show_time", "ticks"]

_TICKS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
    10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000, 3.2e8, 3.2e9, 3.2e10,
)  # fmt: skip


def _utc(time: float) -> datetime.datetime:
    # An event of the year 9999 must not break the page.
    return datetime.datetime.fromtimestamp(min(max(time, 0.0), 253_402_300_799.0), datetime.timezone.utc)


def clock(time: float, step_s: float = 1.0) -> str:
    """Write the time of day in UTC, with the precision that a scale with this step needs."""
    if step_s >= 86400:
        return _utc(time).strftime("%d %b")
    if step_s < 1:
        return _utc(time).strftime("%H:%M:%S.%f")[:-3]
    return _utc(time).strftime("%H:%M" if step_s >= 60 else "%H:%M:%S")


def day(time: float) -> str:
    """Write the day in UTC: "28 May 2026"."""
    return _utc(time).strftime("%d %b %Y").lstrip("0")


def show_time(time: float) -> str:
    """Write day and time in UTC, to the second."""
    return f"{day(time)}, {clock(time)}"


def lasted(seconds: float) -> str:
    """Write a duration: "1 h 2 min", "3 d 4 h", "42 s"."""
    whole = round(seconds)
    if whole < 60:
        return show_seconds(seconds)
    for big, small, names in ((86400, 3600, "dh"), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= big:
            first, second = whole // big, whole % big // small
            return f"{first:,} {names[0]}" + (f" {second} {names[1]}" if second else "")
    return show_seconds(seconds)


def ticks(began: float, ended: float, most: int = 8) -> tuple[float, list[float]]:
    """Return a step of time, and its multiples between two moments, as a rule at most ``most``."""
    span = max(ended - began, 1e-3)
    step = next((step for step in _TICKS_S if span / step <= most), _TICKS_S[-1])
    first = math.ceil(began / step)
    count = min(2 * most, int((ended - first * step) // step) + 1)
    return step, [(first + number) * step for number in range(count)]
