"""The answer of a command: one JSON document for programs, or lines and tables for people. Progress is on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE = 200  # columns, if the output is not a terminal
_PATIENCE_S = 1.0  # before a progress bar appears


class _Stdout(io.RawIOBase):
    """Writes to a file descriptor. When the reader has gone, as after ``| head``, it drops the output."""

    def __init__(self, number: int):
        self._number, self._is_read = number, True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, content: Any) -> int:
        if self._is_read:
            try:
                return os.write(self._number, content)
            except BrokenPipeError:
                self._is_read = False
        return len(content)


def outlive_readers() -> None:
    """Let this process continue and keep its exit code when the reader of its stdout has gone.

    Do nothing if stdout was replaced, as in tests.
    """
    if sys.stdout is sys.__stdout__ and sys.stdout is not None and not sys.stdout.isatty():
        sys.stdout.flush()
        raw = io.BufferedWriter(_Stdout(sys.stdout.fileno()))
        sys.stdout = io.TextIOWrapper(raw, sys.stdout.encoding, sys.stdout.errors)


def answer(as_json: bool, document: Any, words: str | Callable[[Console], None]) -> None:
    """Print what a command found: the document for programs, or words or a table for people. Rank 0 calls it."""
    if as_json or isinstance(words, str):
        click.echo(json.dumps(document, indent=1) if as_json else words)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        words(console)
        return
    console = Console(width=_WIDE, highlight=False, markup=False)
    with console.capture() as shown:
        words(console)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())


def new_table(*columns: str) -> Table:
    """Make a table without lines. A column whose name begins with ">" is aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return table


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
