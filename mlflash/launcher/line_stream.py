"""What programs print, passed on in whole lines: lines of several programs never mix."""

from __future__ import annotations

import contextlib
import os
import threading

_LONGEST_NBYTES = 1 << 20


class Lines:
    """Gathers what a program prints until it can be passed on.

    A carriage return ends a line, too, as bars of progress have it. What is longer than 1 MiB is passed on in pieces.
    """

    def __init__(self) -> None:
        self._begun = bytearray()

    def add(self, printed: bytes) -> bytes:
        """Take what was printed; gives what is whole."""
        end = max(printed.rfind(b"\n"), printed.rfind(b"\r")) + 1
        if not end and len(self._begun) + len(printed) <= _LONGEST_NBYTES:
            self._begun += printed
            return b""
        end = end or len(printed)
        whole = bytes(self._begun) + printed[:end]
        self._begun[:] = printed[end:]
        return whole

    def rest(self) -> bytes:
        """A last line that was not ended, and is now; b"" where there is none."""
        left = bytes(self._begun)
        self._begun.clear()
        return left + b"\n" if left else b""


class Sink:
    """A descriptor that several threads write whole lines to; what nobody reads any more is dropped."""

    def __init__(self, fd: int):
        self._fd, self._one = fd, threading.Lock()

    def write(self, lines: bytes) -> None:
        """Write lines; waits for whoever reads them."""
        with self._one, contextlib.suppress(OSError):
            left = memoryview(lines)
            while left:
                left = left[os.write(self._fd, left) :]
