"""A progress bar for commands that take long."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE_S = 1.0


class Bar:
    """A progress bar on stderr. It appears after a second, and only on a terminal.

    Args:
        what: the name of the work.
        total: bytes; 0: not known yet.
        on: whether this process shows the bar.
    """

    def __init__(self, what: str, total: int = 0, on: bool = True):
        self._what, self._total, self._on = what, total, on and sys.stderr.isatty()
        self._start, self._done = time.monotonic(), 0
        self._shown: Progress | None = None

    def advance(self, nbytes: int) -> None:
        """Note that ``nbytes`` more bytes are done."""
        self.at(self._done + nbytes, self._total)

    def at(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` bytes are done."""
        self._done, self._total = done, total
        if not self._on:
            return
        if self._shown is None and time.monotonic() - self._start > _PATIENCE_S:
            self._shown = _new()
            self._shown.add_task(self._what)
            self._shown.start()
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], completed=done, total=total or None)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()


def _new() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
               TransferSpeedColumn(), TimeElapsedColumn())  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), transient=True)
