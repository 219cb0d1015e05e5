"""A drain as the trainer sees it, from the reports of the courier process (`wire_format.DrainWire`)."""

from __future__ import annotations

from ..config import Config
from ..draining.drain import Drain, Drains
from ..errors import DrainFailed
from .wire_format import DrainWire


class ToldDrain:
    """The newest drain. Set ``drains``, which is told of each drain that begins, before the first one."""

    drains: Drains

    def __init__(self, config: Config):
        self._config = config
        self._number, self._drain = 0, None  # type: tuple[int, Drain | None]

    def take(self, told: DrainWire) -> None:
        """Process a report of its progress."""
        drain = self._drain
        if drain is None or told.number != self._number:
            drain = Drain(told.step, patience_s=self._config.timeout_s)
            self._number, self._drain = told.number, drain
            self.drains.began(drain)
        drain.path, drain.nbytes, drain.written = told.path, told.nbytes, told.written
        drain.progress, drain.moved, drain.silent = told.progress, told.moved, told.silent
        if told.done:
            drain.end(told.error)
            drain.seconds = told.seconds

    def lose(self) -> None:
        """Fail the drain, because its courier has ended. The next courier counts its drains from one again."""
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done:
            drain.end(DrainFailed("the courier of this rank has ended", step=drain.step))
