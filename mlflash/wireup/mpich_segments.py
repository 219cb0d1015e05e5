"""The shared memory that MPICH makes in /dev/shm, and leaves there when its processes are killed.

While a process lives, /proc tells which segments it maps. If it was killed before anybody asked, the segments are
removed whose names follow from the name of the epoch. Segments stay only if an MPICH names them in another way.

Source: MPICH, src/mpid/ch4/shm/posix/posix_init.c and src/util/mpir_pmi.c.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r" /dev/shm/(mpich_(?:shm|vci)_[0-9a-f]{1,16}_[0-9]{1,9})$", re.MULTILINE)


def is_segment(name: object) -> bool:
    """Whether this is the name of such a segment."""
    return isinstance(name, str) and _NAME.fullmatch(f" {SHARED_MEMORY}/{name}") is not None


def mapped_by(pid: int | str) -> set[str]:
    """The names of the segments that a process maps.

    Args:
        pid: of the process, or "self".

    Returns:
        Names; none if the process has ended or belongs to somebody else.
    """
    try:
        return set(_NAME.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    except OSError:
        return set()


def named_after(epoch: str, node: int) -> set[str]:
    """The names of the segments that MPICH 5 makes for an epoch on a node.

    Args:
        epoch: its name, which must never have been used before.
        node: its number, as in `process_mapping`.
    """
    hashes = (_fnv(epoch.encode()), _fnv(f"{epoch}-1".encode()))  # MPICH 5.0 and 5.1
    return {f"mpich_{what}_{hashed:x}_{node}" for what in ("shm", "vci") for hashed in hashes}


def remove_unmapped(names: Collection[str]) -> set[str]:
    """Remove those of these segments that no process maps any more.

    Args:
        names: of segments that our couriers mapped.

    Returns:
        Names of the segments that are still mapped.
    """
    ours = {name for name in names if _is_ours(name)}
    if not ours:
        return set()
    still = ours & _mapped_by_any(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    for name in ours - still:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return still


def _fnv(text: bytes) -> int:
    """Hash by FNV-1a, 32 bits."""
    hashed = 2166136261
    for byte in text:
        hashed = (hashed ^ byte) * 16777619 & 0xFFFFFFFF
    return hashed


def _mapped_by_any(pids: Iterable[int]) -> set[str]:
    return set().union(*map(mapped_by, pids))


def _is_ours(name: str) -> bool:
    try:
        found = (SHARED_MEMORY / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
