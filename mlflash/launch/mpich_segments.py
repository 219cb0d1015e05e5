"""The shared memory that MPICH makes in /dev/shm, and leaves there when its processes are killed.

While a process lives, /proc tells which segments it maps. If it was killed before anybody asked, the segments are
removed whose names follow from the name of the epoch. Segments stay only if an MPICH names them in another way.

So a zygote writes the names of its couriers' segments to a file in a private directory of its user, and holds a lock
on it while it lives: a scheduler that ends a job kills the zygote, too, and each relaunch on the node would leave some
MiB. Before the next zygote has a courier start MPI, it removes what files name that nobody holds.

Source: MPICH, src/mpid/ch4/shm/posix/posix_init.c and src/util/mpir_pmi.c.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from .own_process import opened

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r" /dev/shm/(mpich_(?:shm|vci)_[0-9a-f]{1,16}_[0-9]{1,9})$", re.MULTILINE)


def is_segment(name: object) -> bool:
    """Whether this is the name of such a segment."""
    return isinstance(name, str) and _NAME.fullmatch(f" {SHARED_MEMORY}/{name}") is not None


def mapped_by(pid: int | str) -> set[str]:
    """The names of the segments that a process maps; none if it has ended or belongs to somebody else."""
    try:
        return set(_NAME.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    except OSError:
        return set()


def named_after(epoch: str, node: int) -> set[str]:
    """The names of the segments that MPICH 5 makes for an epoch on a node, numbered as in `process_mapping`."""
    hashes = (_fnv(epoch.encode()), _fnv(f"{epoch}-1".encode()))  # MPICH 5.0 and 5.1
    return {f"mpich_{what}_{hashed:x}_{node}" for what in ("shm", "vci") for hashed in hashes}


def remove_unmapped(names: Collection[str]) -> set[str]:
    """Remove those of these segments that no process maps any more; return the others."""
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


_PREFIX = "segments-"


class SegmentRecord:
    """The file of one zygote in a private directory of its user. Close it; it may be closed twice.

    It also removes what zygotes have left that were killed. Raises OSError or UnsafePath: no file can be written there.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        with opened(directory) as folder:
            _remove_left(Path(folder))
            self._name, self._fd = _made(Path(folder))

    def add(self, names: Collection[str]) -> None:
        """Add names of segments, before MPI makes them."""
        os.write(self._fd, "".join(f"{name}\n" for name in sorted(names)).encode())

    def close(self) -> None:
        """Remove the file: nothing is left, or another zygote's file names it, too."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / self._name).unlink()
            os.close(self._fd)
            self._fd = -1


def _made(folder: Path) -> tuple[str, int]:
    while True:
        name = f"{_PREFIX}{secrets.token_hex(8)}"
        fd = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)  # somebody has just taken it for left


def _remove_left(folder: Path) -> None:
    """Remove the segments that files name that nobody holds, unless a file names them that somebody holds."""
    with contextlib.ExitStack() as held:
        left: dict[Path, set[str]] = {}
        used: set[str] = set()
        for path in folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # its zygote has just ended
                file = held.enter_context(path.open())
                names = {name for name in file.read().split() if is_segment(name)}
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left[path] = names
                except BlockingIOError:
                    used |= names
        still = remove_unmapped(set().union(*left.values()) - used)
        for path, names in left.items():
            if not names & (still | used):
                path.unlink(missing_ok=True)
