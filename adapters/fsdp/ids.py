"""Checkpoint ids → what is saved, and the step.

An id is a path. One part of it may say the step (``step-100``, ``step100``, ``iter_0000100``, ``100``); the rest names
what is saved, such as the shards of one set of replicas: ``/scratch/run1/step-100/tp0_ep0_fsdp1`` is step 100 of
``/scratch/run1/tp0_ep0_fsdp1``. A URL (``s3://bucket/…``) is not in memory: it is written as it is, through fsspec.
"""

from __future__ import annotations

import hashlib
import os
import re

_STEP = re.compile(r"(?:(?:global_)?step|iter|iteration|checkpoint)?[-_]?(\d{1,18})", re.IGNORECASE)


def is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether an id is written to an object store or another file system."""
    return "://" in os.fspath(checkpoint_id)


def parse(checkpoint_id: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Tell what an id names, and the step; None where it says none. The last part that can be a step is it.

    Example:
        ``"run/step-100/tp0_ep0_fsdp1"`` → ``("run/tp0_ep0_fsdp1", 100)``; ``"tp0_ep0_fsdp1"`` has no step.
    """
    parts = [part for part in os.fspath(checkpoint_id).split("/") if part not in ("", ".")]
    for at in reversed(range(len(parts))):
        if (found := _STEP.fullmatch(parts[at])) is not None:
            return "/".join(parts[:at] + parts[at + 1 :]), int(found[1])
    return "/".join(parts), None


def job_of(job: str, name: str) -> str:
    """Name the job of what an id names: different names never share memory."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rpartition("/")[2])[:16]
    return f"{job[:37]}.{stem}.{digest}".replace("..", ".")
