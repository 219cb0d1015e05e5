"""Services for processes of mlflash: how they are started, to be killed when their parent ends, and to have a name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import UnsafePath

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# Loaded before any fork. None is the program itself, which contains the C library.
_libc = ctypes.CDLL(None, use_errno=True)


def running(module: str) -> list[str]:
    """The command that runs a module, and finds no other module in the working directory.

    With ``python -m``, a file ``tokenize.py`` in the working directory would be run in the place of Python's own.
    mlflash itself is found where this process has it. The arguments of the program follow the command.
    """
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; import runpy; " \
            f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"  # fmt: skip
    return [sys.executable, "-c", start]


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, or now if it has already ended.

    ``parent``: its process id, taken before this process was forked.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def forget_memory_policy() -> None:
    """Take memory near the core that asks for it, whatever policy (``numactl``) the parent of this process had."""
    number = {"x86_64": 238, "aarch64": 237}.get(os.uname().machine)  # of set_mempolicy, which the C library has not
    if number is not None:
        _libc.syscall(number, 0, None, 0)


def set_name(name: str) -> None:
    """Set the name that ``ps``, ``top`` and ``/proc/PID/comm`` show, at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def allow(count: int) -> str:
    """Allow this process a number of open descriptors. Return why that is not possible; "" if it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = hard == resource.RLIM_INFINITY
    if not is_unlimited and hard < count:
        return (
            f"needs {count} open files, and the hard limit of this host is {hard}: raise it (ulimit -Hn, or "
            "LimitNOFILE of the daemon that starts it)"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if is_unlimited else hard, hard))
    return ""


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[str]:
    """Open a private directory of this user; make it if it does not exist.

    Yields a path that always means the directory that was checked, and that is short enough for a socket in it. Raises
    UnsafePath: it is somebody else's, or open to others.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700, parents=True)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafePath(f"{directory} cannot be opened as a directory: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UnsafePath(
                f"{directory} must belong to this user, and nobody else may enter it",
                expected=f"user {os.geteuid()}, mode 700",
                found=f"user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
            )
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
