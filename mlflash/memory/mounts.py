"""Which file system a directory is on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

MEMORY_KINDS = ("tmpfs", "ramfs")
"""File systems whose files are memory."""


@dataclasses.dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Attributes:
        device: number of the file system, ``major:minor``: two tmpfs of one node differ in it.
        options: of the file system: "rw,size=24684092k".
    """

    device: str
    point: str
    kind: str
    options: str


def find_mount(mountinfo: str, path: str) -> Mount | None:
    """Find the file system of a path; of several mounts in one place, the last one covers the others.

    Args:
        path: absolute, without links.

    Source: proc_pid_mountinfo(5).
    """
    best: Mount | None = None
    for line in mountinfo.splitlines():
        fields, _, behind = line.partition(" - ")
        before, after = fields.split(), behind.split()
        if len(before) < 6 or len(after) < 2:
            continue
        point = before[4].encode().decode("unicode_escape") if "\\" in before[4] else before[4]
        covers = path == point or path.startswith(point.rstrip("/") + "/")
        if covers and (best is None or len(point) >= len(best.point)):
            best = Mount(before[2], point, after[0], after[2] if len(after) > 2 else "")
    return best


def mounted(path: str, pid: str = "self", root: str = "/") -> Mount | None:
    """The file system of a path as a process sees it; None if that cannot be seen."""
    try:
        text = Path(root, "proc", pid, "mountinfo").read_text()
    except OSError:
        return None
    return find_mount(text, os.path.realpath(path))


def slow_kind(path: str) -> str:
    """Name the kind of file system of a path if it is not memory; "" if it is, or if that cannot be found out."""
    mount = mounted(path)
    return "" if mount is None or mount.kind in MEMORY_KINDS else mount.kind
