"""Measures what a tree of processes takes: CPU seconds, and memory, their private pages and everything in /dev/shm.

Run as a program, it measures memory again and again until its input ends, and then prints the maximum. It is a separate
process, so it also measures while the ranks hold the GIL.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from select import select

INTERVAL_S = 0.005


def cpu_s() -> float:
    """CPU seconds of this process, its ended children and its running descendants."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_cpu_s_of, descendants(os.getpid())))


def _cpu_s_of(pid: int) -> float:
    # The id that clock_getcpuclockid returns. This clock is finer than the hundredths of a second in /proc.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it has just ended
        return 0.0


def held(root: int, besides: int = 0) -> int:
    """Return the bytes that the descendants of a process hold, except ``besides``, plus the bytes in /dev/shm.

    Pages that a forked child shares with its parent count once, because the kernel reports proportional shares.
    """
    private = sum(_private(pid) for pid in descendants(root) if pid != besides)
    shm = os.statvfs("/dev/shm")
    return private + (shm.f_blocks - shm.f_bfree) * shm.f_frsize


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        some = children.get(todo.pop(), [])
        found += some
        todo += some
    return found


def _private(pid: int) -> int:
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))


@contextlib.contextmanager
def watching(root: int, most: list[int]) -> Iterator[None]:
    """Append the maximum that is held while the block runs."""
    argv = [sys.executable, "-S", __file__, str(root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()  # it has measured once
        yield
        most.append(int(watcher.communicate(timeout=60)[0]))


def main() -> None:
    root = int(sys.argv[1])
    most = held(root, os.getpid())
    print(flush=True)
    while not select([sys.stdin], [], [], INTERVAL_S)[0]:
        most = max(most, held(root, os.getpid()))
    print(max(most, held(root, os.getpid())))


if __name__ == "__main__":
    main()
