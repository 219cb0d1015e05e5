"""The shared memory that MPICH makes in /dev/shm, and leaves there when its processes are killed.

Its name follows from the epoch's name, by a hash that is MPICH's own; so a process is asked, through /proc, which ones
it maps, while it lives.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r" /dev/shm/(mpich_shm_[0-9a-f]{1,16}_[0-9]{1,9})$", re.MULTILINE)


def is_segment(name: object) -> bool:
    """Whether this is the name of such a segment, and of nothing else. Not collective."""
    return isinstance(name, str) and _NAME.fullmatch(f" {SHARED_MEMORY}/{name}") is not None


def mapped_by(pid: int | str) -> set[str]:
    """Name the segments that a process maps. Not collective.

    Args:
        pid: of the process, or "self".

    Returns:
        none where the process has ended, or belongs to somebody else.
    """
    try:
        return set(_NAME.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    except OSError:
        return set()


def remove_unmapped(names: Collection[str]) -> set[str]:
    """Remove those of these segments that no process maps any more. Not collective.

    Args:
        names: of segments that couriers of ours mapped.

    Returns:
        those that are still mapped.
    """
    ours = {name for name in names if _is_ours(name)}
    if not ours:
        return set()
    still = ours & _mapped_by_any(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    for name in ours - still:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return still


def _mapped_by_any(pids: Iterable[int]) -> set[str]:
    return set().union(*map(mapped_by, pids))


def _is_ours(name: str) -> bool:
    try:
        found = (SHARED_MEMORY / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
