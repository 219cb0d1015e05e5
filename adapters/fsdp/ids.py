"""Checkpoint ids of `Checkpoints`: which are URLs, and the name in memory of what an id names; SMP's reader of one."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re

from mlflash.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DistributedFileSystemReader:
    """An id to load from, in SMP's words: `Checkpoints.load` takes either.

    Attributes:
        checkpoint_id: that was given to `Checkpoints.async_save`; without a step, the newest.
    """

    checkpoint_id: str | os.PathLike[str]


def only_one(checkpoint_id: str | os.PathLike[str] | None,
             reader: DistributedFileSystemReader | None) -> str | os.PathLike[str]:  # fmt: skip
    """Give the id that a call of SMP's has, by itself or in a reader."""
    if checkpoint_id is None and isinstance(reader, DistributedFileSystemReader):
        return reader.checkpoint_id
    if checkpoint_id is not None and reader is None:
        return checkpoint_id
    raise ConfigError(
        "give load either a checkpoint id or a reader that has one", found=f"{checkpoint_id!r} and {reader!r}",
        expected="checkpoint_id=, or storage_reader=fsdp.DistributedFileSystemReader(checkpoint_id)",
    )  # fmt: skip


def is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether an id is written to an object store or another file system."""
    return "://" in os.fspath(checkpoint_id)


def job_of(job: str, name: str) -> str:
    """Name the job of what an id names: different names never share memory."""
    return f"{job[:37]}.{folder_of(name)}".replace("..", ".")


def folder_of(name: str) -> str:
    """A folder's name for what an id names; it ends with eight digits that no other name has."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rpartition("/")[2])[:16]
    return f"{stem}.{digest}"
