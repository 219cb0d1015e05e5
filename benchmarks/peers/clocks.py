"""CPU seconds of this process and of all processes that it has started."""

from __future__ import annotations

import os
import resource
import time

from memory import descendants


def cpu_s() -> float:
    """CPU seconds of this process, its ended children and its running descendants."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_of, descendants(os.getpid())))


def _of(pid: int) -> float:
    # The id that clock_getcpuclockid returns. This clock is finer than the hundredths of a second in /proc.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it has just ended
        return 0.0
