"""Which shared memory of MPI the couriers of a zygote map, for whoever has to remove it if all of them are killed.

MPICH removes its segments in MPI_Finalize. A zygote removes those of its couriers, but a scheduler that ends a job
kills the zygote, too, and each relaunch on the node would leave some MiB of memory. So a zygote writes their names to a
file in a private directory of its user, and holds a lock on it while it lives. Before the next zygote has a courier
start MPI, it removes what files name that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Collection
from pathlib import Path

from . import mpich_segments
from .private_directory import opened

_PREFIX = "segments-"


class SegmentRecord:
    """The file of one zygote. Close it; it may be closed twice.

    It also removes what zygotes have left that were killed.

    Args:
        directory: private to this user; made if needed.

    Raises:
        OSError, UnsafePath: no file can be written there.
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
                names = {name for name in file.read().split() if mpich_segments.is_segment(name)}
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left[path] = names
                except BlockingIOError:
                    used |= names
        still = mpich_segments.remove_unmapped(set().union(*left.values()) - used)
        for path, names in left.items():
            if not names & (still | used):
                path.unlink(missing_ok=True)
