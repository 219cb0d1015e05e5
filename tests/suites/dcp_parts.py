"""What stands in the place of PyTorch's FileSystemWriter and FileSystemReader: a path names a job in memory."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch.distributed as dist
from on_node import settings_of
from torch.distributed.checkpoint import filesystem

from mlflash import Checkpointer
from mlflash.adapters.dcp import MemoryReader, MemoryWriter

_open: dict[str, Checkpointer] = {}
_AnyPath = str | os.PathLike[str]


def checkpointer(path: _AnyPath) -> Checkpointer:
    """That of a path, which all writers and readers of a process share. Collective, the first time."""
    name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:16]
    if name not in _open:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own = settings_of(rank, os.environ["MLFLASH_MEMORY"])
        scheme = "copy" if ranks > 1 else "none"
        _open[name] = Checkpointer(job=name, redundancy=scheme, timeout_s=60, **own)
    return _open[name]


def close_all() -> None:
    """Close them, or give them up where a test has failed. Collective."""
    while _open:
        _, part = _open.popitem()
        if sys.exc_info()[0] is None:
            part.close()
        else:
            part.abandon()


class _OfPaths:
    """What both have: a path is the id, and says which job it is."""

    _checkpointer: Checkpointer | None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _AnyPath) -> bool:
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: _AnyPath | None = None) -> None:
        if checkpoint_id is not None and self._checkpointer is not None:
            self._checkpointer = checkpointer(checkpoint_id)
        super().reset(None)  # type: ignore[misc]


class FileSystemWriter(_OfPaths, MemoryWriter):
    """Saves in memory what is to be saved below a path; what says how files are written is left aside."""

    def __new__(cls, *args: Any, **kwargs: Any) -> FileSystemWriter:
        return super().__new__(cls)  # type: ignore[return-value]

    def __init__(self, path: _AnyPath, *args: Any, **kwargs: Any):
        super().__init__(checkpointer(path))


class FileSystemReader(_OfPaths, MemoryReader):
    """Loads from memory what is to be loaded from below a path."""

    def __init__(self, path: _AnyPath, *args: Any, **kwargs: Any):
        super().__init__(checkpointer(path))
