"""What is in a memory file system besides slots: files that NCCL, an MPI or a data loader has made or left there."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pwd
import re
import stat
from collections.abc import Iterator, Set

from . import user_directory

_MOST_ENTRIES = 10_000  # of one directory; what is behind them is not counted
_BEGIN = re.compile(r"[^-_.]+[-_.]")  # "nccl-" of "nccl-KmLxQa"
_Kind = tuple[str, int]  # names, and the number of the user


@dataclasses.dataclass(frozen=True)
class OtherFiles:
    """Files and directories of one user whose names begin alike.

    Attributes:
        name: of all of them, such as "nccl-*".
        inodes: of those that are regular files.
    """

    name: str
    uid: int
    count: int
    nbytes: int
    inodes: tuple[int, ...]

    @property
    def user(self) -> str:
        """Name or number of the owner."""
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
    own = {os.path.basename(path) for path in user_directory.directories(memory)}
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
    """The inodes of the files of a memory file system that processes have mapped, as far as this one may look.

    Not collective; it reads what each process maps. A container may hide processes.
    """
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
