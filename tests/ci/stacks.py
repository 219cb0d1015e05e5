"""The stacks of a test that takes too long, printed while it goes on, and the end of one that cannot be interrupted.

A wait inside of MPI or of torch's C++ goes on when pytest-timeout's signal arrives: such a test ends its process, and a
run of all tests says which one it was instead of being killed at its own limit.

pytest's own stacks (`faulthandler_timeout`) are read without the interpreter's lock while threads run, and have ended a
run of all tests by a segmentation fault; here only a process that ends anyway is read so.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback

AFTER = "stacks_after"
"""The setting of pytest that says after how many seconds."""
LATE = "; its stacks:"
"""How the line ends that names such a test."""
FAILED = "failed so far: "
"""How the line begins that names a test which has failed, and why; a run ended at its limit leaves no report."""
_GRACE_S = 60  # beyond the time that pytest-timeout gives a test


class Watch:
    """A thread that prints them, once for each test."""

    def __init__(self, after_s: float):
        self._after_s, self._stderr = after_s, os.dup(2)  # which pytest has not redirected yet
        self._news = threading.Condition()
        self._test, self._until = "", 0.0
        threading.Thread(target=self._look, name="stacks", daemon=True).start()

    def begin(self, test: str, limit_s: float = 0) -> None:
        """Watch over a test from here on, which pytest-timeout interrupts after limit_s (0: it does not); "": none."""
        if limit_s:
            faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=self._stderr)
        else:
            faulthandler.cancel_dump_traceback_later()
        with self._news:
            self._test, self._until = test, time.monotonic() + self._after_s
            self._news.notify()

    def say(self, text: str) -> None:
        """Print a line at once, whatever pytest does with what is printed."""
        os.write(self._stderr, f"\n{text}\n".encode())

    def end(self) -> None:
        """Let the process end, which nothing that a test has left may keep from it."""
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=self._stderr)

    def _look(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._test)
                test, left = self._test, self._until - time.monotonic()
                if left > 0:
                    self._news.wait(left)
                    continue
                self._test = ""
            self.say(f"{test} has not ended after {self._after_s:g} s{LATE}\n{stacks()}")


def stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [(names.get(ident, "?"), frame) for ident, frame in sys._current_frames().items()
             if ident != threading.get_ident()]  # fmt: skip
    return "\n".join(f"thread {name}\n{''.join(traceback.format_stack(frame))}" for name, frame in found)
