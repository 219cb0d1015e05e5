"""The results of an examination, as lines on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..command_line.output import answer
from ..human_readable.wording import many
from .findings import Diagnosis, Level

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def show(found: Diagnosis, as_json: bool) -> None:
    """Print all results. Not collective."""
    answer(as_json, found.to_json(), lambda console: _show(found, console))


def _show(found: Diagnosis, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    ranks, nodes = sum(map(len, found.ranks_on.values())), len(found.ranks_on)
    console.print(f"{many(ranks, 'rank')} on {many(nodes, 'node')}, {found.started}")
    subject, table = "", Table.grid()
    for line in found.lines:
        if line.subject != subject:
            subject = line.subject
            console.print(table)
            console.print(f"{subject}", style="bold")
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(width=7)
            table.add_column(width=17)
            table.add_column(overflow="fold")
        level, where = line.level.name.lower(), found.where(line)
        table.add_row(Text(level, style=_STYLES[level]), line.check, line.words + (f" ({where})" if where else ""))
        if line.advice:
            table.add_row("", "", f"→ {line.remedy}")
    console.print(table)
    errors, warnings = found.count(Level.ERROR), found.count(Level.WARNING)
    console.print(f"{many(errors, 'error')}, {many(warnings, 'warning')}")
