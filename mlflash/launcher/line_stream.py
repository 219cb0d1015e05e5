"""Passes on the output of programs in whole lines, so that lines of several programs never mix."""

from __future__ import annotations

import contextlib
import os
import threading

_LONGEST_NBYTES = 1 << 20


class Lines:
    """Collects the output of a program until it can be passed on.

    A carriage return also ends a line, for progress bars. Lines longer than 1 MiB are passed on in pieces.
    """

    def __init__(self) -> None:
        self._begun = bytearray()

    def add(self, printed: bytes) -> bytes:
        """Add output; return the lines that are complete."""
        end = max(printed.rfind(b"\n"), printed.rfind(b"\r")) + 1
        if not end and len(self._begun) + len(printed) <= _LONGEST_NBYTES:
            self._begun += printed
            return b""
        end = end or len(printed)
        whole = bytes(self._begun) + printed[:end]
        self._begun[:] = printed[end:]
        return whole

    def rest(self) -> bytes:
        """The last line, if it has no end yet, with a newline added; b"" if there is none."""
        left = bytes(self._begun)
        self._begun.clear()
        return left + b"\n" if left else b""


class Sink:
    """A descriptor to which several threads write whole lines. If nobody reads any more, lines are dropped."""

    def __init__(self, fd: int):
        self._fd, self._one = fd, threading.Lock()

    def write(self, lines: bytes) -> None:
        """Write lines; wait until they are read."""
        with self._one, contextlib.suppress(OSError):
            left = memoryview(lines)
            while left:
                left = left[os.write(self._fd, left) :]
