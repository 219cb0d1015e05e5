"""Whether systemd-logind deletes this user's files in shared memory when the user logs out of a node."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .findings import Finding, fine, warning

_FIRST_USER = 1000  # system users have smaller numbers, and logind does not touch their files


def removal(memory: str, uid: int, root: str = "/") -> list[Finding]:
    """Look at RemoveIPC of logind, if logind runs and memory is /dev/shm. Not collective.

    Args:
        memory: the memory file system.
        uid: number of this user.
        root: the directory that contains /etc, /usr and /run.

    Source: logind.conf(5), RemoveIPC.
    """
    if not memory.startswith("/dev/shm") or not Path(root, "run/systemd/users").is_dir():
        return []
    if uid < _FIRST_USER:
        return [fine("logout", "does not delete files of this system user")]
    tops = [Path(root, top, "systemd") for top in ("usr/lib", "etc")]
    parts = [part for top in tops for part in top.glob("logind.conf.d/*.conf")]
    files = [*(top / "logind.conf" for top in tops), *sorted(parts, key=lambda part: part.name)]
    if removes_ipc(_text(file) for file in files):
        return [warning("logout", "systemd-logind deletes this user's files in /dev/shm after the last logout",
                        "do not ssh into nodes of a job, or run loginctl enable-linger; as root, set RemoveIPC=no in "
                        "/etc/systemd/logind.conf")]  # fmt: skip
    return [fine("logout", "does not touch /dev/shm (RemoveIPC=no)")]


def removes_ipc(texts: Iterable[str]) -> bool:
    """Read RemoveIPC from configuration files. Later files win; a line behind ``#`` shows the built-in value."""
    built_in, said = "yes", ""
    for text in texts:
        for comment, value in re.findall(r"^\s*([#;]?)\s*RemoveIPC\s*=\s*(\S*)", text, re.MULTILINE):
            if comment:
                built_in = value
            else:
                said = value
    return (said or built_in).lower() in ("yes", "1", "true", "on", "y", "t")


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
