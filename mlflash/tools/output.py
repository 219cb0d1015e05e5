"""The answer of a command: one JSON document for programs, or lines and tables for people. Progress is on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..text import show_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE = 200  # columns, if the output is not a terminal
_PATIENCE_S = 1.0  # before a progress bar appears


def print_answer(as_json: bool, document: Any, words: str | Callable[[Console], None]) -> None:
    """Print what a command has found: the document for programs, or words or a table for people."""
    try:
        _print(json.dumps(document, indent=1) if as_json else words)
    except BrokenPipeError:  # its reader has gone, as after ``| head``, and the exit code still says how all is
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(words: str | Callable[[Console], None]) -> None:
    if isinstance(words, str):
        click.echo(words)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        words(console)
        return
    console = Console(width=_WIDE, highlight=False, markup=False)
    with console.capture() as shown:
        words(console)
    click.echo("\n".join(line.rstrip() for line in shown.get().splitlines()))


def new_table(*columns: str) -> Table:
    """Make a table without lines. A column whose name begins with ">" is aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return table


def age_s(unix_ns: int) -> float:
    """Return the seconds since a time."""
    return round(max(0.0, time.time() - unix_ns / 1e9), 3)


def show_age(unix_ns: int) -> str:
    """Write the time since a time."""
    return show_seconds(age_s(unix_ns))


@contextlib.contextmanager
def progress_bar(work: str, total: int = 0, on: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr. It appears after a second, and only on a terminal.

    Yields:
        A function that gets the number of further bytes, or what `rich.progress.Progress.update` takes.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    console, start = Console(stderr=True), time.monotonic()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeElapsedColumn(), console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task(work, total=total or None)

    def update(advance: int = 0, **fields: Any) -> None:
        bar.update(task, advance=advance, **fields)
        if on and console.is_terminal and not bar.live.is_started and time.monotonic() - start > _PATIENCE_S:
            bar.start()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()
