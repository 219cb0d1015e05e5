"""The stacks of a test that takes too long, printed while it goes on: a wait inside of MPI is never interrupted.

pytest's own (`faulthandler_timeout`) reads the frames of threads that run, without the interpreter's lock, and has
ended a run of all tests by a segmentation fault.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

AFTER = "stacks_after"
"""The setting of pytest that says after how many seconds."""


class Watch:
    """A thread that prints them, once for each test."""

    def __init__(self, after_s: float):
        self._after_s, self._stderr = after_s, os.dup(2)  # which pytest has not redirected yet
        self._news = threading.Condition()
        self._test, self._until = "", 0.0
        threading.Thread(target=self._look, name="stacks", daemon=True).start()

    def begin(self, test: str) -> None:
        """Watch over a test from here on; "": none."""
        with self._news:
            self._test, self._until = test, time.monotonic() + self._after_s
            self._news.notify()

    def _look(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._test)
                test, left = self._test, self._until - time.monotonic()
                if left > 0:
                    self._news.wait(left)
                    continue
                self._test = ""
            os.write(self._stderr, f"\n{test} has not ended after {self._after_s:g} s:\n{stacks()}\n".encode())


def stacks() -> str:
    """What each thread of this process is doing."""
    names = {one.ident: one.name for one in threading.enumerate()}
    found = [(names.get(ident, "?"), frame) for ident, frame in sys._current_frames().items()
             if ident != threading.get_ident()]  # fmt: skip
    return "\n".join(f"thread {name}\n{''.join(traceback.format_stack(frame))}" for name, frame in found)
