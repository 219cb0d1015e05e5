"""Bytes, times, shares, counts and lists of names and ranks, as people write and read them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from .errors import ConfigError

LIGHT = "+light"
"""After the name of a job: that of its light saves."""

_BYTES = {
    "": 1, "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
}  # fmt: skip
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "y": 365.25 * 86_400}
YEAR_S = _SECONDS["y"]
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?) *([a-zA-Z]*)")


def read_bytes(text: str) -> int:
    """Read a number of bytes: ``read_bytes("12GiB") == 12 << 30``, ``read_bytes("80GB") == 80 * 10**9``.

    Raises:
        ConfigError: this is not a number of bytes, or not a whole one. "3.6" usually misses its unit.
    """
    expected = "bytes such as 12GiB (2^30), 80GB (10^9) or 500MB"
    nbytes = _read(text, {**_BYTES, "kB": 1000}, expected)
    if nbytes < 1000 and nbytes != int(nbytes):
        raise ConfigError("not a whole number of bytes: give a unit", expected=expected, found=repr(text[:80]))
    return round(nbytes)


def read_seconds(text: str) -> float:
    """Read a time: ``read_seconds("30000h") == 1.08e8``. A number without a unit is seconds."""
    return _read(text, _SECONDS, "a time such as 0.5s, 250ms, 2min, 30000h, 200d or 5y")


def _read(text: str, units: Mapping[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in units or not 0 <= float(match[1]) < 1e30:
        raise ConfigError("this value cannot be read", expected=expected, found=repr(text[:80]))
    return float(match[1]) * units[match[2]]


def show_bytes(nbytes: float) -> str:
    """Write bytes: ``show_bytes(12 << 30) == "12 GiB"``."""
    power = 0
    while nbytes >= 1024 and power < 5:
        nbytes, power = nbytes / 1024, power + 1
    return f"{_short(nbytes, 1)} {'KMGTP'[power - 1]}iB" if power else f"{nbytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """Write a time with two or three digits: ``show_seconds(93) == "93 s"``, ``show_seconds(5400) == "90 min"``."""
    for unit, above in (("y", 2), ("d", 3), ("h", 1), ("min", 2), ("s", 1)):
        count = seconds / _SECONDS[unit]
        if count >= above:
            return f"{_short(count, 0 if count >= 10 else 1)} {unit}"
    return f"{_short(seconds * 1000, 0 if seconds >= 0.01 else 1)} ms"


def show_share(share: float) -> str:
    """Write a share in percent with two digits: ``show_share(0.00123) == "0.12 %"``."""
    return f"{100 * share:.1f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _short(number: float, digits: int) -> str:
    """Write a number without a zero after its decimal point: 12.0 → 12."""
    return f"{number:.{digits}f}".removesuffix(".0")


def listed(names: Sequence[str], most: int = 4) -> str:
    """List names, but not too many: "n1, n2 and 3 more"."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def last_words(text: str, nothing: str = "it prints nothing") -> str:
    """The last line of what a program has printed that says something; ``nothing`` if there is none."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalpha, line))]
    return lines[-1] if lines else nothing


def many(count: int, thing: str) -> str:
    """Count something: "1 launch", "2 launches", "1,024 ranks"."""
    if count == 1:
        return f"1 {thing}"
    return f"{count:,} {thing}{'es' if thing.endswith(('ch', 's', 'sh')) else 's'}"


def runs(numbers: Iterable[int]) -> list[str]:
    """Write numbers as ranges: ``runs([0, 1, 2, 5]) == ["0-2", "5"]``."""
    text = []
    ordered = sorted(set(numbers))
    for _, run in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        text.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return text


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: ``ranges([0, 1, 2, 5]) == "0-2, 5"``; nothing is "-"."""
    return ", ".join(runs(numbers)) or "-"


def named(ranks: Iterable[int]) -> str:
    """Name ranks: ``named([3]) == "rank 3"``, ``named([0, 1]) == "ranks 0-1"``."""
    distinct = set(ranks)
    return f"rank{'s' * (len(distinct) != 1)} {ranges(distinct)}"
