"""A directory in which processes of one user meet, and nobody else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import UnsafePath


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[str]:
    """Open a directory of this user alone, made if it is not there. Not collective.

    Gives a path to it that stays that of the one that was looked at, and is short enough for a socket in it.

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
                f"{directory} has to belong to this user, and nobody else may enter it",
                expected=f"user {os.geteuid()}, mode 700",
                found=f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
            )
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
