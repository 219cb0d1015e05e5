"""How many bytes of memory this node has left: tmpfs, cgroup, RAM.

An allocation beyond a cgroup limit ends in SIGKILL, not in an error, so the limit is read before anything is allocated.
"""

from __future__ import annotations

import os
from pathlib import Path

_LEAST_HEADROOM_NBYTES, _MOST_HEADROOM_NBYTES = 1 << 20, 64 << 20


def headroom(nbytes: int) -> int:
    """How much must stay free on a node when ``nbytes`` are allocated: an eighth of them, 1 MiB to 64 MiB.

    Between the check and the allocation, other software allocates too: MPI and torch allocate buffers, which are larger
    if tensors are. 64 MiB are enough for these on a node of a cluster. But a small state, such as a test or a demo has
    on the 64 MiB that Docker gives, must not need forty times its size.
    """
    return min(max(nbytes // 8, _LEAST_HEADROOM_NBYTES), _MOST_HEADROOM_NBYTES)


def available(directory: str, root: str = "/") -> dict[str, int]:
    """Read what is left, in bytes, by the name of the limit; the smallest number counts.

    Limits that cannot be read are left out.
    """
    stat = os.statvfs(directory)
    left = {f"free space of {directory}": stat.f_bavail * stat.f_frsize}
    for line in _read(Path(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            left["MemAvailable of the node"] = int(line.split()[1]) * 1024
    for group in _cgroups(root):
        if (room := _cgroup_room(group)) is not None:
            left[f"memory limit of cgroup {group}"] = room
    return left


def _cgroups(root: str) -> list[Path]:
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
        here = top / path.lstrip("/")
        while here != top and top in here.parents:
            groups.append(here)
            here = here.parent
        groups.append(top)
    return groups


def _cgroup_room(group: Path) -> int | None:
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:  # v1 writes about 2^63 for "no limit"
            stat = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines())
            # The kernel drops unused file cache before it kills a process.
            return max(0, int(limit) - int(used) + int(stat.get(cache, 0)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
