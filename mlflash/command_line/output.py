"""How a command answers: one JSON document for programs, or lines and tables on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE = 200  # columns, where the output is no terminal


def answer(as_json: bool, document: Any, show: Callable[[Console], None]) -> None:
    """Print what a command found: for programs, or for people. Not collective; for rank 0."""
    if as_json:
        click.echo(json.dumps(document, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        show(console)
        return
    console = Console(width=_WIDE, highlight=False, markup=False)
    with console.capture() as shown:
        show(console)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())


def new_table(*columns: str) -> Table:
    """A table without lines; columns whose name begins with ">" are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return table
