"""A secret that only one user knows, on all nodes: ranks that are told nothing else by their launcher trust it.

It is ``MLFLASH_TOKEN``, which `mlflash run` sets, or else a file that only this user can read: in the home directory,
which the nodes of a cluster share, or, for ranks of one host, in this user's directory in memory.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import UnsafePath
from .own_process import opened

TOKEN = "MLFLASH_TOKEN"
"""The variable, whose value is the same on all ranks."""
_NAME = "token"


def token_of(environment: Mapping[str, str], directory: Path | None, *launch: str) -> str:
    """The token of a launch: 32 hexadecimal digits that follow from the secret and from what all its ranks know.

    ``directory``: private to this user, where all ranks can look; None: the home directory. Raises UnsafePath: others
    can read the secret, or it cannot be kept.
    """
    secret = environment.get(TOKEN) or _kept(directory or Path.home() / ".config" / "mlflash")
    return hmac.new(secret.encode(), "\0".join(launch).encode(), "sha256").hexdigest()[:32]


def _kept(directory: Path) -> str:
    try:
        with opened(directory) as folder:
            path = f"{folder}/{_NAME}"
            with contextlib.suppress(FileExistsError):
                _make(path)
            with open(path) as file:
                found = os.fstat(file.fileno())
                if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                    raise UnsafePath(f"{directory / _NAME} must belong to this user, and nobody else may read it",
                                     expected=f"user {os.geteuid()}, mode 600",
                                     found=f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}")  # fmt: skip
                return file.read()
    except OSError as error:
        raise UnsafePath(f"the secret by which ranks know each other cannot be kept in {directory}: {error}. Set "
                         f"{TOKEN} to the same text on all ranks") from error  # fmt: skip


def _make(path: str) -> None:
    """Make the file, at once with what it contains: another rank may do the same. Raises FileExistsError."""
    if os.path.exists(path):
        return
    new = f"{path}.{secrets.token_hex(4)}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        os.link(new, path)
    finally:
        os.unlink(new)
