"""Checkpoints that Lightning wrote to disk: find the step of one, or another one if the file is incomplete."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import fsspec  # comes with Lightning
import torch

log = logging.getLogger("mlflash")

_TORN = (EOFError, pickle.UnpicklingError, RuntimeError)
"""What torch raises for a file that was not written completely."""


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A checkpoint on disk.

    Attributes:
        path: its path. None: the file is incomplete, and there is no other.
        step: its step. None: unknown.
    """

    path: Any
    step: int | None = None


def look(path: Any) -> OnDisk:
    """Read the step of a checkpoint. If the file is incomplete, take the newest readable one of the same folder.

    Not collective. It logs a warning for each file that it cannot read.
    """
    try:
        return OnDisk(path, _step_of(path))
    except _TORN as error:
        log.warning("%s cannot be read, so mlflash looks for another checkpoint: %r", path, error)
    except (OSError, KeyError, ImportError, ValueError) as error:
        log.warning("the step of %s is not known (%s): mlflash assumes that memory is newer", path, error)
        return OnDisk(path)
    return max(_beside(Path(path)), key=lambda one: one.step or 0, default=OnDisk(None))


def _beside(torn: Path) -> list[OnDisk]:
    """Find the other checkpoints of the same folder that can be read."""
    found = []
    for path in sorted(torn.parent.glob(f"*{torn.suffix}")):
        if path == torn or path.is_dir() != torn.is_dir():
            continue
        try:
            found.append(OnDisk(str(path), _step_of(path)))
        except (*_TORN, OSError, KeyError, ImportError, ValueError) as error:
            log.warning("%s cannot be read: %r", path, error)
    return found


def _step_of(path: Any) -> int:
    if not os.path.exists(path):
        with fsspec.open(str(path), "rb") as remote:
            return int(torch.load(remote, map_location="meta", weights_only=False)["global_step"])
    file = Path(path, "meta.pt") if os.path.isdir(path) else path
    if file != path and not os.path.exists(file):
        raise EOFError("it has no meta.pt, which is written last")
    with open(file, "rb") as opened:
        is_zip = opened.read(2) == b"PK"  # this format can be mapped
    try:
        return int(torch.load(file, map_location="cpu", mmap=is_zip, weights_only=False)["global_step"])
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: torch looked for the end record before the first byte
            raise
        raise EOFError(f"the file is cut off: {error}") from error
