"""The result of a check, and how the results of many ranks become a few lines."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..human_readable.units import show_bytes, show_seconds
from ..human_readable.wording import named

Range = tuple[float, float]
_NAMED = 4  # nodes named in a line


class Level(enum.IntEnum):
    """How bad a result is."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check, on one rank or on all ranks with the same result.

    Attributes:
        check: name of the check.
        level: how bad the result is.
        text: the result, with the names of ``values`` in braces.
        advice: what the user can do. Empty if nothing is wrong.
        values: strings and ranges of numbers. Results with different strings are different lines. Numbers are merged to
            the range from the smallest to the largest of all ranks. The end of a name is the unit: ``_nbytes``, ``_s``,
            ``_gbs`` (10^9 bytes per second).
        subject: heading.
        nodes: the nodes with this result. Empty: it holds for all nodes together.
        ranks: the ranks with this result. Empty: it holds for whole nodes.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    values: Mapping[str, str | Range] = dataclasses.field(default_factory=dict)
    subject: str = ""
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The text with its values."""
        return self.text.format_map({name: show(name, value) for name, value in self.values.items()})

    @property
    def remedy(self) -> str:
        """The advice with its values."""
        return self.advice.format_map({name: show(name, value) for name, value in self.values.items()})

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "subject": self.subject, "check": self.check, "level": self.level.name.lower(), "text": self.words,
            "advice": self.remedy or None, "values": dict(self.values), "nodes": list(self.nodes),
            "ranks": list(self.ranks),
        }  # fmt: skip


def fine(check: str, text: str, **values: str | float) -> Finding:
    """Make a result without a fault."""
    return Finding(check, Level.OK, text, values=_ranges(values))


def warning(check: str, text: str, advice: str, **values: str | float) -> Finding:
    """Make a result that the user should look at, with advice."""
    return Finding(check, Level.WARNING, text, advice, _ranges(values))


def wrong(check: str, text: str, advice: str, **values: str | float) -> Finding:
    """Make a result that will not work, with advice."""
    return Finding(check, Level.ERROR, text, advice, _ranges(values))


def _ranges(values: Mapping[str, str | float]) -> dict[str, str | Range]:
    return {name: value if isinstance(value, str) else (value, value) for name, value in values.items()}


def show(name: str, value: str | Range) -> str:
    """Write a value with its unit: ``show("put_gbs", (4.0, 5.5)) == "4.0 to 5.5 GB/s"``."""
    if isinstance(value, str):
        return value
    low, high = (_show_number(name, number) for number in value)
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') and unit else low} to {high}"


def _show_number(name: str, number: float) -> str:
    if name.endswith("_nbytes"):
        return show_bytes(number)
    if name.endswith("_gbs"):
        return f"{number:.1f} GB/s" if number >= 0.1 else f"{number:.2g} GB/s"
    if name.endswith("_s"):
        return show_seconds(number)
    return f"{number:,.0f}"


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal results to one line. The order is that of the first results; the worst of each check comes first.

    Example:
        "3 GiB free" of rank 0 on a and "5 GiB free" of rank 1 on b → "3 to 5 GiB free" of ranks 0, 1 on a, b.
    """
    checks: dict[tuple[str, str], dict[tuple[object, ...], list[Finding]]] = {}
    for one in findings:
        words = tuple((name, value) for name, value in sorted(one.values.items()) if isinstance(value, str))
        of_check = checks.setdefault((one.subject, one.check), {})
        of_check.setdefault((one.level, one.text, one.advice, words, bool(one.nodes), bool(one.ranks)), []).append(one)
    subjects = list(dict.fromkeys(subject for subject, _ in checks))
    return [
        _joined(same)
        for wanted in subjects
        for (subject, _), of_check in checks.items()
        if subject == wanted
        for same in sorted(of_check.values(), key=lambda same: -same[0].level)
    ]


def _joined(same: Sequence[Finding]) -> Finding:
    values: dict[str, str | Range] = dict(same[0].values)
    for other in same[1:]:
        for name, value in other.values.items():
            before = values[name]
            if not isinstance(value, str) and not isinstance(before, str):
                values[name] = (min(before[0], value[0]), max(before[1], value[1]))
    nodes = tuple(dict.fromkeys(node for one in same for node in one.nodes))
    ranks = tuple(sorted({rank for one in same for rank in one.ranks}))
    return dataclasses.replace(same[0], values=values, nodes=nodes, ranks=ranks)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All results.

    Attributes:
        started: who started the processes, and how many.
        ranks_on: the ranks of each node.
        lines: merged results.
    """

    started: str
    ranks_on: Mapping[str, tuple[int, ...]]
    lines: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether no result is an error."""
        return all(line.level < Level.ERROR for line in self.lines)

    def count(self, level: Level) -> int:
        """Count the lines of a level."""
        return sum(line.level is level for line in self.lines)

    def where(self, line: Finding) -> str:
        """Name the nodes or ranks of a line. Return "" if it holds for all ranks of the only node.

        Example:
            "all 4 nodes"; "node2"; "n1, n2, n3, n4 and 60 more nodes"; "rank 3 on node1"; "ranks 1, 3".
        """
        if not line.nodes:
            return ""
        there = {rank for node in line.nodes for rank in self.ranks_on.get(node, ())}
        if line.ranks and there - set(line.ranks):
            return named(line.ranks) + (f" on {line.nodes[0]}" if len(line.nodes) == 1 < len(self.ranks_on) else "")
        if len(line.nodes) >= len(self.ranks_on):
            return f"all {len(line.nodes)} nodes" if len(line.nodes) > 1 else ""
        more = len(line.nodes) - _NAMED
        return ", ".join(line.nodes[:_NAMED]) + (f" and {more} more nodes" if more > 0 else "")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "well": self.is_well,
            "started": self.started,
            "warnings": self.count(Level.WARNING),
            "errors": self.count(Level.ERROR),
            "nodes": {node: list(ranks) for node, ranks in self.ranks_on.items()},
            "lines": [line.to_json() for line in self.lines],
        }
