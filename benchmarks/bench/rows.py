"""The common form of all results, and its tables for a terminal and in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from .aims import PLAIN

Samples = Mapping[str, np.ndarray]  # by name: seconds of the slowest rank, shape (repetitions,)


class Row(TypedDict, total=False):
    """A line of a table.

    Attributes:
        what: the title.
        seconds: the median.
        over: by yardstick: the median ratio of the same repetitions, and its quartiles.
        shows: the aim of bench/aims.py with which the row is compared.
        case: the table to which the row belongs, or "" if there is only one.
        column: the column, in a table with several times per line. Such a table shows no quartiles.
        note: a remark. A row that only counts, or that failed, has a note and no times.
    """

    what: str
    seconds: float
    over: dict[str, list[float]]
    shows: str
    case: str
    column: str
    note: str


def row(what: str, samples: np.ndarray, yardsticks: Mapping[str, Any], shows: str = "", **more: str) -> Row:
    """Make a row from seconds, shape ``(repetitions,)``, and from yardsticks, each of that shape or a number."""
    ratios = {name: samples / yardstick for name, yardstick in yardsticks.items()}
    over = {name: np.quantile(values, (0.5, 0.25, 0.75)).tolist() for name, values in ratios.items()}
    made = Row(what=what, seconds=float(np.median(samples)), over=over)
    made.update({"shows": shows, **more})  # type: ignore[typeddict-item]
    return made


class Grid(NamedTuple):
    """A table of words."""

    title: str
    heads: list[str]
    lines: list[list[str]]


def grids(rows: Iterable[Row]) -> list[Grid]:
    """Make one table for each case, in the order of the rows."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.get("case", ""), []).append(row)
    return [(_wide if any("column" in row for row in some) else _long)(case, some) for case, some in cases.items()]


def _long(case: str, rows: Sequence[Row]) -> Grid:
    """Make a table with one line per row and one column per yardstick."""
    yardsticks = list(dict.fromkeys(name for row in rows for name in row.get("over", ())))
    has_seconds, has_notes = any("seconds" in row for row in rows), any(row.get("note") for row in rows)
    heads = ["what", *["s"] * has_seconds, *(f"/ {name}" for name in yardsticks), *["note"] * has_notes]
    lines = [
        [row["what"], *[_seconds(row)] * has_seconds, *(ratio(row, name) for name in yardsticks),
         *[row.get("note", "")] * has_notes]
        for row in rows
    ]  # fmt: skip
    return Grid(case, heads, lines)


def _wide(case: str, rows: Sequence[Row]) -> Grid:
    """Make a table with several values per line: ratios to the first yardstick, which the title names, or notes."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    yardstick = next((name for row in rows for name in row.get("over", ()) if name not in PLAIN), "")
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        median = ratio(row, yardstick).partition(" ")[0]
        value = f"{median} ({_seconds(row)})" if median and "seconds" in row else median or _seconds(row)
        cells.setdefault(row["what"], {})[row["column"]] = "; ".join(filter(None, (value, row.get("note", ""))))
    lines = [[what, *(values.get(name, "") for name in columns)] for what, values in cells.items()]
    return Grid(f"{case}: times {yardstick} (seconds)" if yardstick else case, ["what", *columns], lines)


def _seconds(row: Row) -> str:
    return f"{row['seconds']:.3g}" if "seconds" in row else ""


def ratio(row: Row, name: str) -> str:
    """Format median and quartiles of a ratio."""
    if name not in row.get("over", ()):
        return ""
    median, low, high = row["over"][name]
    return _number(median) + (f" ({_number(low)}–{_number(high)})" if low < median or median < high else "")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def show(header: Mapping[str, Any], tables: Iterable[Grid]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    console.print(Markdown("\n".join(map(markdown, tables))))


def markdown(grid: Grid) -> str:
    head, *lines = ("| " + " | ".join(line) + " |" for line in (grid.heads, *grid.lines))
    text = "\n".join([head, "|---" * len(grid.heads) + "|", *lines])
    return (f"**{grid.title}**\n\n" if grid.title else "") + text + "\n"
