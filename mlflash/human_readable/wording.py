"""Counts, names and ranks in sentences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence


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
        those = [number for _, number in run]
        text.append(str(those[0]) if len(those) == 1 else f"{those[0]}-{those[-1]}")
    return text


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: ``ranges([0, 1, 2, 5]) == "0-2, 5"``; nothing is "-"."""
    return ", ".join(runs(numbers)) or "-"


def named(ranks: Iterable[int]) -> str:
    """Name ranks: ``named([3]) == "rank 3"``, ``named([0, 1]) == "ranks 0-1"``."""
    those = set(ranks)
    return f"rank{'s' * (len(those) != 1)} {ranges(those)}"
