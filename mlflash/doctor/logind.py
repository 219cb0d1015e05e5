"""Whether systemd-logind deletes this user's files in shared memory when the user logs out of a node."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .findings import Finding, fine, warning

_FIRST_USER = 1000  # below are system users, whom this spares


def removal(memory: str, uid: int, root: str = "/") -> list[Finding]:
    """Look at RemoveIPC of logind, where that runs and /dev/shm is meant. Not collective.

    Args:
        memory: the memory file system.
        uid: of this user.
        root: where /etc, /usr and /run are looked for.

    Source: logind.conf(5), RemoveIPC.
    """
    if not memory.startswith("/dev/shm") or not Path(root, "run/systemd/users").is_dir():
        return []
    if uid < _FIRST_USER:
        return [fine("logout", "deletes nothing of this system user")]
    tops = [Path(root, top, "systemd") for top in ("usr/lib", "etc")]
    parts = [part for top in tops for part in top.glob("logind.conf.d/*.conf")]
    files = [*(top / "logind.conf" for top in tops), *sorted(parts, key=lambda part: part.name)]
    if removes_ipc(_text(file) for file in files):
        return [warning("logout", "systemd-logind deletes this user's files in /dev/shm after the last logout",
                        "do not ssh into nodes of a job, or loginctl enable-linger; as root: RemoveIPC=no in "
                        "/etc/systemd/logind.conf")]  # fmt: skip
    return [fine("logout", "leaves /dev/shm alone (RemoveIPC=no)")]


def removes_ipc(texts: Iterable[str]) -> bool:
    """Read RemoveIPC from configuration files, later ones first; a line behind ``#`` shows what was built in."""
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
