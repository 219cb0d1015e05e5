"""Formats rows as tables, for a terminal and in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .rows import Row, aims_of, reached

COLOURS = {"yes": "green", "no": "red"}


class Grid(NamedTuple):
    """A table of words."""

    title: str
    heads: list[str]
    lines: list[list[str]]


def grids(rows: Sequence[Row]) -> list[Grid]:
    """Make one table for each case, in the order of the rows."""
    cases: dict[str, list[Row]] = {}
    for one in rows:
        cases.setdefault(one.get("case", ""), []).append(one)
    return [(_wide if any("column" in one for one in of) else _long)(case, of) for case, of in cases.items()]


def _long(case: str, rows: Sequence[Row]) -> Grid:
    """Make a table with one line per row and one column per yardstick."""
    yardsticks = list(dict.fromkeys(name for one in rows for name in one.get("over", ())))
    has_aims, has_notes = any(map(aims_of, rows)), any(one.get("note") for one in rows)
    heads = ["what", "median, s", *(f"/ {name}" for name in yardsticks)]
    heads += ["aim", "reached"] * has_aims + ["note"] * has_notes
    lines = []
    for one in rows:
        line = [one["what"], seconds(one), *(ratio(one, name) for name in yardsticks)]
        line += [aim(one), verdict(one)] * has_aims + [one.get("note", "")] * has_notes
        lines.append(line)
    return Grid(case, heads, lines)


def _wide(case: str, rows: Sequence[Row]) -> Grid:
    """Make a table with several times per line, as seconds and ratios. The title names the common yardstick."""
    columns = list(dict.fromkeys(one.get("column", "") for one in rows))
    timed = [one["over"] for one in rows if one.get("over")]  # some rows only count, or never ended
    common = [name for name in timed[0] if all(name in over for over in timed)] if timed else []
    cells: dict[str, dict[str, str]] = {}
    for one in rows:
        text = [f"{seconds(one)} s"] if "seconds" in one else []
        text += [ratio(one, name) + ("" if name in common else f" x {name}") for name in one.get("over", ())]
        text += [f"aim {aim(one)}: {verdict(one)}"] if aims_of(one) else []
        text += [one["note"]] if one.get("note") else []
        cells.setdefault(one["what"], {})[one.get("column", "")] = "; ".join(text)
    lines = [[what, *(of.get(name, "") for name in columns)] for what, of in cells.items()]
    seconds_of = f"{case}: seconds" if any("seconds" in one for one in rows) else case
    return Grid(", / ".join([seconds_of, *common]), ["what", *columns], lines)


def seconds(one: Row) -> str:
    value = one.get("seconds")
    return "" if value is None else f"{value:.4f}" if value < 1 else f"{value:.3f}"


def number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def ratio(one: Row, name: str) -> str:
    """Format median and quartiles of a ratio."""
    if name not in one.get("over", ()):  # some rows only count, and have no time
        return ""
    spread = one.get("spread", {}).get(name)
    return number(one["over"][name]) + (f" ({number(spread[0])}–{number(spread[1])})" if spread else "")


def aim(one: Row) -> str:
    return " and ".join(f"≤ {most:g} x {of}" for of, most in aims_of(one))


def verdict(one: Row) -> str:
    good = reached(one)
    return "" if good is None else "yes" if good else "no"


def show(header: Mapping[str, Any], found: Sequence[Grid]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    for grid in found:
        table = Table(title=grid.title or None)
        for head in grid.heads:
            is_number = head.startswith(("median", "/"))
            table.add_column(head, justify="right" if is_number else "left")
        for line in grid.lines:
            table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in line))
        console.print(table)


def markdown(grid: Grid) -> str:
    lines = [grid.heads, ["---"] * len(grid.heads), *grid.lines]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return (f"**{grid.title}**\n\n" if grid.title else "") + text + "\n"


def header_in_words(header: Mapping[str, Any]) -> str:
    """Write where, when and with what the results were measured."""
    return ", ".join(f"{name} {value}" for name, value in header.items() if value != "") + ".\n"
