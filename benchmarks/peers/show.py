"""Tables of what was measured, for a terminal and for README.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from listed import BY_NAME, COPY
from rich.console import Console
from rich.table import Table
from rows import MEMCPY, Row, cells_of

COLUMNS = ("", "stall", "stall / ours", "whole", "whole / ours", "CPU", "load", "restore", "first stall, s",
           "memory: at rest", "save", "restore")  # fmt: skip


def show(header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Print everything."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)
    for shape, lines in _tables(rows):
        table = Table(*COLUMNS, title=f"{shape}: multiples of memcpy (quartiles), bytes held per byte of state")
        for line in lines:
            table.add_row(*line)
        console.print(table)


def markdown(rows: Sequence[Row]) -> str:
    """The same tables as text."""
    text = []
    for shape, lines in _tables(rows):
        head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" + "--:|" * (len(COLUMNS) - 1)]
        text += [f"### {shape}", "", *head, *(f"| {' | '.join(line)} |" for line in lines), ""]
    return "\n".join(text)


def _tables(rows: Sequence[Row]) -> list[tuple[str, list[list[str]]]]:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    return [(shape, [_line(who, of) for who, of in cells_of(rows, shape).items()]) for shape in shapes]


def _line(who: str, of: dict[str, Any]) -> list[str]:
    mark = " *" if BY_NAME[who].beside == COPY else ""  # a copy on another node
    held = [f"{of['held'][key]:.2f}" for key in ("at rest", "save", "restore")]
    return [
        who + mark, _ratio(of["stall"]), _ours(of, "stall"), _ratio(of["whole"]), _ours(of, "whole"), _ratio(of["CPU"]),
        _ratio(of["load"]), _ratio(of["restore"]), f"{of['first stall']:.3f}", *held,
    ]  # fmt: skip


def _ratio(time: dict[str, Any]) -> str:
    low, high = time["spread"]
    return f"{_short(time['over'][MEMCPY])} ({_short(low)}–{_short(high)})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _ours(of: dict[str, Any], time: str) -> str:
    ratio = of["ours"][time]
    return "" if ratio is None else _short(ratio)
