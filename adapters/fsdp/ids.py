"""Checkpoint ids of `Checkpoints`: which of them are URLs, which job a name has in memory, and SMP's reader."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re

from mlflash.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DistributedFileSystemReader:
    """Holds an id to load from, as in SMP. `Checkpoints.load` takes this or the id itself.

    Attributes:
        checkpoint_id: the id that you gave to `Checkpoints.async_save`. Without a step, the newest is loaded.
    """

    checkpoint_id: str | os.PathLike[str]


def only_one(checkpoint_id: str | os.PathLike[str] | None,
             reader: DistributedFileSystemReader | None) -> str | os.PathLike[str]:  # fmt: skip
    """Give the checkpoint id of a call, which is given directly or in a reader."""
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
    """Give the job that the checkpoints of a name have in memory. Different names have different jobs."""
    return f"{job[:37]}.{folder_of(name)}".replace("..", ".")


def folder_of(name: str) -> str:
    """Give the folder of a name. It ends with the first eight hexadecimal digits of the name's SHA-256."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rpartition("/")[2])[:16]
    return f"{stem}.{digest}"
