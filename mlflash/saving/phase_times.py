"""How long each phase of a save takes on one rank, by its own clock; see `telemetry.lateness`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseTimes:
    """The phases of one save.

    Args:
        waited_s: returns how long the courier has waited for anything so far.
        copy_s: seconds from the call of `save` until its state was in the slot.
    """

    def __init__(self, waited_s: Callable[[], float], copy_s: float):
        self._waited_s = waited_s
        self._since, self._waited = time.perf_counter(), waited_s()
        self.took = {"training": 0.0, "copy": max(0.0, copy_s), "deferred": 0.0, "checksums": 0.0, "transfer": 0.0}

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count the time of a ``with`` block as a phase, including its waits."""
        began, waited = time.perf_counter(), self._waited_s()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.took[phase] += seconds
            self._since += seconds
            self._waited += self._waited_s() - waited

    def begin_announcing(self) -> None:
        """Note that this rank is ready to save: from now on it waits for other ranks to come to the save."""
        self._waited = self._waited_s()

    def announced(self) -> None:
        """Note that all ranks have come to this save."""
        self.took["training"] = self._waited_s() - self._waited
        self._since, self._waited = time.perf_counter(), self._waited_s()

    def protected(self) -> None:
        """Note that this rank is ready to agree on the commit."""
        self.took["transfer"] = self._waited_s() - self._waited
        self.took["checksums"] = max(0.0, time.perf_counter() - self._since - self.took["transfer"])
