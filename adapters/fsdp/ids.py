"""Checkpoint ids of `Checkpoints`: which are URLs, and the name in memory of what an id names."""

from __future__ import annotations

import hashlib
import os
import re


def is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether an id is written to an object store or another file system."""
    return "://" in os.fspath(checkpoint_id)


def job_of(job: str, name: str) -> str:
    """Name the job of what an id names: different names never share memory."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rpartition("/")[2])[:16]
    return f"{job[:37]}.{stem}.{digest}".replace("..", ".")
