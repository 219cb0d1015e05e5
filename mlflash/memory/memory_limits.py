"""How many bytes of memory this node has left: tmpfs, cgroup, RAM; and what else takes them.

An allocation beyond a cgroup limit ends in SIGKILL, not in an error, so the limit is read before anything is allocated.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pwd
import re
import stat
from collections.abc import Iterator, Set
from pathlib import Path

from .node_directory import user_directories

_LEAST_HEADROOM_NBYTES, _MOST_HEADROOM_NBYTES = 1 << 20, 64 << 20


def headroom(nbytes: int) -> int:
    """How much must stay free on a node when ``nbytes`` are allocated: an eighth of them, 1 MiB to 64 MiB.

    Between the check and the allocation, other software allocates too: MPI and torch allocate buffers, which are larger
    if tensors are. 64 MiB are enough for these on a node of a cluster. But a small state, such as a test or a demo has
    on the 64 MiB that Docker gives, must not need forty times its size.
    """
    return min(max(nbytes // 8, _LEAST_HEADROOM_NBYTES), _MOST_HEADROOM_NBYTES)


def available(directory: str, root: str = "/") -> dict[str, int]:
    """Read what is left, in bytes, by the name of the limit; the smallest counts. Unreadable ones are left out."""
    status = os.statvfs(directory)
    free = {f"free space of {directory}": status.f_bavail * status.f_frsize}
    for line in _read(Path(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free["MemAvailable of the node"] = int(line.split()[1]) * 1024
    for group in memory_cgroups(root):
        if (room := _cgroup_room(group)) is not None:
            free[f"memory limit of cgroup {group}"] = room
    return free


def memory_cgroups(root: str) -> list[Path]:
    """This process's memory cgroups and their parents: any of them may have the limit."""
    mounts = {}
    for line in _read(Path(root, "proc/self/mounts")).splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            mounts[""] = where
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts["memory"] = where
    groups = []
    for line in _read(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        mount = mounts.get("memory" if "memory" in controllers.split(",") else controllers)
        if mount is None:
            continue
        top = Path(root, mount.lstrip("/"))
        group = top / path.lstrip("/")
        while group != top and top in group.parents:
            groups.append(group)
            group = group.parent
        groups.append(top)
    return groups


def _cgroup_room(group: Path) -> int | None:
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:  # v1 writes about 2^63 for "no limit"
            numbers = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines())
            # The kernel drops unused file cache before it kills a process.
            return max(0, int(limit) - int(used) + int(numbers.get(cache, 0)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Which file system a directory is on


MEMORY_KINDS = ("tmpfs", "ramfs")
"""File systems whose files are memory."""


@dataclasses.dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    device: str  # number of the file system, major:minor: two tmpfs of one node differ in it
    point: str
    kind: str
    options: str  # of the file system: "rw,size=24684092k"


def mounted(path: str, pid: str = "self", root: str = "/") -> Mount | None:
    """The file system of a path as a process sees it; None if that cannot be seen.

    Of several mounts in one place, the last one covers the others.

    Source: proc_pid_mountinfo(5).
    """
    path = os.path.realpath(path)
    best: Mount | None = None
    for line in _read(Path(root, "proc", pid, "mountinfo")).splitlines():
        fields, _, behind = line.partition(" - ")
        before, after = fields.split(), behind.split()
        if len(before) < 6 or len(after) < 2:
            continue
        point = before[4].encode().decode("unicode_escape") if "\\" in before[4] else before[4]
        covers = path == point or path.startswith(point.rstrip("/") + "/")
        if covers and (best is None or len(point) >= len(best.point)):
            best = Mount(before[2], point, after[0], after[2] if len(after) > 2 else "")
    return best


def slow_kind(path: str) -> str:
    """Name the kind of file system of a path if it is not memory; "" if it is, or if that cannot be found out."""
    mount = mounted(path)
    return "" if mount is None or mount.kind in MEMORY_KINDS else mount.kind


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
    own = {os.path.basename(path) for path in user_directories(memory)}
    nbytes, count = collections.Counter[_Kind](), collections.Counter[_Kind]()
    files = dict[_Kind, list[int]]()
    for entry in _first_entries(memory):
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
    inodes, inside = set[int](), os.path.join(memory, "")
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", errors="replace") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(inside):
                    inodes.add(int(fields[4]))
    return inodes


def _first_entries(path: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:  # it may belong to another user
        for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
            yield entry


def _nbytes(entry: os.DirEntry[str], status: os.stat_result) -> int:
    if not entry.is_dir(follow_symlinks=False):
        return 512 * status.st_blocks
    total = 0
    for below in _first_entries(entry.path):
        with contextlib.suppress(OSError):
            total += _nbytes(below, below.stat(follow_symlinks=False))
    return total
