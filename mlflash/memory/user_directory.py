"""This user's directory in a memory file system, even if somebody else took its name first.

Anybody may take the name ``mlflash-<uid>``, because everybody may write to /dev/shm. Whatever is not a directory of
this user is passed over, with one warning; then ``mlflash-<uid>.1`` is next, and so on. All processes that look for a
job find it by the same rule: the first of this user's directories that has the job, otherwise the first of them,
otherwise the first free name.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import pwd
import re
import stat
from collections.abc import Iterator, Set

from ..errors import ConfigError, UnsafePath

log = logging.getLogger("mlflash")

PRIVATE = "owned by this user, no access for group and others, not a link"
_MOST = 1000  # names to try; whoever takes more of them could also fill the memory
_passed_over: set[str] = set()


def is_private(status: os.stat_result) -> bool:
    """Whether only this user can use a file or directory."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def describe(status: os.stat_result) -> str:
    """Say what a file or directory is, and who owns it."""
    return f"{stat.filemode(status.st_mode)} uid {status.st_uid}, {status.st_nlink} links"


def pass_over(path: str, found: str) -> None:
    """Warn, once in this process, about something that is not ours: it is neither used nor deleted."""
    if path not in _passed_over:
        _passed_over.add(path)
        log.warning("%s is passed over, as it is not mlflash's: %s", path, found)


def look(memory: str) -> tuple[list[str], dict[str, str]]:
    """Find out who has the names of this user's directories.

    Returns:
        The paths of those that belong to this user, in their order; and what the others are, by path.
    """
    names = re.compile(rf"mlflash-{os.getuid()}(?:\.([1-9]\d*))?")
    there = {int(found[1] or 0): name for name in os.listdir(memory) if (found := names.fullmatch(name))}
    own, taken = [], {}
    for _, name in sorted(there.items()):
        path = os.path.join(memory, name)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            own.append(path)
        else:
            taken[path] = describe(status)
    return own, taken


def directories(memory: str) -> list[str]:
    """List this user's directories, in the order in which a job is looked for."""
    try:
        own, taken = look(memory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for path, found in taken.items():
        pass_over(path, found)
    return own


def find(memory: str, job: str) -> str | None:
    """Find the directory of this user that has a job, or would get it; None if there is none."""
    own = directories(memory)
    return next((path for path in own if os.path.isdir(os.path.join(path, job))), own[0] if own else None)


def claim(memory: str, job: str) -> str:
    """Find the directory for a job, or make one.

    The first rank of a node does it for all, so that somebody who takes and frees names meanwhile
    cannot divide them.

    Raises:
        ConfigError: none can be made in this memory.
        UnsafePath: somebody has taken all names.
    """
    found = find(memory, job)
    for number in range(_MOST):
        if found is not None:
            return found
        path = os.path.join(memory, f"mlflash-{os.getuid()}" + (f".{number}" if number else ""))
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass  # another user has it, or another process of this user has just made it
        except OSError as error:
            raise ConfigError(f"no directory can be made in {memory}: {error.strerror}", found=path) from None
        found = find(memory, job)
    raise UnsafePath(f"other users have taken all names for a directory of this user in {memory}", expected=PRIVATE,
                     found=f"{_MOST} of them, from {os.path.join(memory, f'mlflash-{os.getuid()}')} on")  # fmt: skip


# What else is in the memory: files that NCCL, an MPI or a data loader has made or left there


_MOST_ENTRIES = 10_000  # of one directory; what is behind them is not counted
_BEGIN = re.compile(r"[^-_.]+[-_.]")  # "nccl-" of "nccl-KmLxQa"
_Kind = tuple[str, int]  # names, and the number of the user


@dataclasses.dataclass(frozen=True)
class OtherFiles:
    """Files and directories of one user whose names begin alike."""

    name: str  # of all of them, such as "nccl-*"
    uid: int
    count: int
    nbytes: int
    inodes: tuple[int, ...]  # of those that are regular files

    @property
    def user(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)

    def unmapped(self, mapped: Set[int]) -> int:
        """How many of the files no process has mapped; 0 if this process cannot look at those of the owner."""
        return sum(inode not in mapped for inode in self.inodes) if os.getuid() in (0, self.uid) else 0

    def __str__(self) -> str:
        return f"{self.name} of user {self.user}: {self.nbytes:,} bytes in {self.count} files"


def other_files(memory: str) -> list[OtherFiles]:
    """List what is in a memory file system besides the jobs of this user, the largest first."""
    own = {os.path.basename(path) for path in directories(memory)}
    nbytes, count = collections.Counter[_Kind](), collections.Counter[_Kind]()
    files = dict[_Kind, list[int]]()
    for entry in _entries(memory):
        with contextlib.suppress(OSError):  # it has just been deleted
            status = entry.stat(follow_symlinks=False)
            begin = _BEGIN.match(entry.name)
            kind = f"{begin[0]}*" if begin else entry.name, status.st_uid
            if entry.name not in own:
                nbytes[kind] += _nbytes(entry, status)
                count[kind] += 1
                files.setdefault(kind, []).extend([status.st_ino] if stat.S_ISREG(status.st_mode) else [])
    return [OtherFiles(*kind, count[kind], size, tuple(files[kind])) for kind, size in nbytes.most_common() if size]


def mapped_files(memory: str) -> set[int]:
    """The inodes of the files of a memory file system that processes have mapped, as far as this one may look."""
    found, inside = set[int](), os.path.join(memory, "")
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", errors="replace") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(inside):
                    found.add(int(fields[4]))
    return found


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:  # it may belong to another user
        for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
            yield entry


def _nbytes(entry: os.DirEntry[str], status: os.stat_result) -> int:
    if not entry.is_dir(follow_symlinks=False):
        return 512 * status.st_blocks
    total = 0
    for one in _entries(entry.path):
        with contextlib.suppress(OSError):
            total += _nbytes(one, one.stat(follow_symlinks=False))
    return total
