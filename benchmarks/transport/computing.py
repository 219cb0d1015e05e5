"""The work of the main thread while a second thread drives MPI: it waits, or it computes like a training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

IDLE, PYTHON, MATMUL = "idle", "python", "matmul"
MAINS = (IDLE, PYTHON, MATMUL)
ALONE_S = 0.1


class Computing:
    """A main thread's work, in loops of about a tenth of a millisecond to a millisecond.

    Args:
        kind: ``idle`` waits. ``python`` is a loop that never releases the interpreter by itself. ``matmul`` is small
            matrix products of torch, and each of them releases the interpreter.
    """

    def __init__(self, kind: str):
        self._loop: Callable[[], object] | None = {IDLE: lambda: None, PYTHON: _python, MATMUL: _matmul}[kind]()

    def until(self, done: threading.Event, at_most_s: float) -> int:
        """Compute until ``done`` is set, but at most ``at_most_s`` seconds. Return the number of loops."""
        if self._loop is None:
            done.wait(at_most_s)
            return 0
        end, loops = time.monotonic() + at_most_s, 0
        while not done.is_set() and time.monotonic() < end:
            self._loop()
            loops += 1
        return loops

    def loops_per_s(self) -> float:
        """Measure the speed while nothing else runs in this process."""
        start = time.monotonic()
        return self.until(threading.Event(), ALONE_S if self._loop else 0.0) / (time.monotonic() - start)


def _python() -> Callable[[], object]:
    def loop() -> None:
        for _ in range(10_000):
            pass

    return loop


def _matmul() -> Callable[[], object]:
    import torch  # here, because the import takes seconds

    torch.set_num_threads(1)
    a, out = torch.rand(256, 256), torch.empty(256, 256)
    return lambda: torch.mm(a, a, out=out)
