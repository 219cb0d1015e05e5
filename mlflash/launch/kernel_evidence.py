"""What the kernel of this node shows of failures: processes that it killed for lack of memory, and errors of GPUs.

It counts the first in the cgroup of this process (v1 and v2), and logs both. In a container both may be unreadable.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ..memory.memory_limits import memory_cgroups

_COUNTERS = ("memory.events", "memory.oom_control")  # v2 and v1
_RELEVANT = re.compile(r"ut of memory|NVRM: Xid")


class KernelEvidence:
    """Counters and log of the kernel, from now on. ``root``: where /proc, /sys and /dev are."""

    def __init__(self, root: str = "/"):
        files = [group / name for group in memory_cgroups(root) for name in _COUNTERS]
        self._counter = next((file for file in files if _oom_kills(file) is not None), None)
        self._before = self._total()
        self._lines: list[str] = []
        self._log = -1
        with contextlib.suppress(OSError):
            self._log = os.open(Path(root, "dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def oom_kills(self) -> int | None:
        """How many processes of the cgroup were killed for lack of memory since the last call; None: unknown."""
        total, before = self._total(), self._before
        self._before = total
        return None if total is None or before is None else total - before

    def mark(self) -> int:
        """Read the log up to now. Return how many of its lines so far are about memory or GPUs."""
        self._lines += filter(_RELEVANT.search, self._read())
        return len(self._lines)

    def since(self, mark: int) -> list[str]:
        """The lines of the log about memory or GPUs since `mark` returned this."""
        return self._lines[mark : self.mark()]

    def _total(self) -> int | None:
        return None if self._counter is None else _oom_kills(self._counter)

    def _read(self) -> list[str]:
        text = b""
        while self._log >= 0:
            try:
                record = os.read(self._log, 1 << 14)  # one record, or many of a file
            except BrokenPipeError:  # the kernel has overwritten what was not read yet
                continue
            except OSError:  # BlockingIOError: that was all
                break
            if not record:
                break
            text += record + b"\n"
        lines = text.decode(errors="replace").splitlines()
        return [line.partition(";")[2] for line in lines if not line.startswith(" ")]  # else a property of the record


def _oom_kills(file: Path) -> int | None:
    try:
        fields = dict(line.split()[:2] for line in file.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
