"""A directory in which only processes of one user meet."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import UnsafePath


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[str]:
    """Open a private directory of this user; make it if it does not exist.

    Yields a path that always means the directory that was checked, and that is short enough for a socket in it.

    Raises:
        UnsafePath: it is somebody else's, or open to others.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700, parents=True)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafePath(f"{directory} cannot be opened as a directory: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise UnsafePath(
                f"{directory} must belong to this user, and nobody else may enter it",
                expected=f"user {os.geteuid()}, mode 700",
                found=f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
            )
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
