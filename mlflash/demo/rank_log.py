"""The log of a rank, as lines of JSON in a file that outlives it, and a memcpy to compare with.

The log does not go through mpiexec, because output that mpiexec has not yet forwarded is lost when a rank dies.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np


class RankLog:
    """The log of one rank.

    Args:
        folder: folder of the run's logs.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"rank{rank}.jsonl"
        self._read = 0

    def tell(self, event: str, **facts: Any) -> None:
        """Append a line. Not collective."""
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")

    def news(self) -> list[dict[str, Any]]:
        """Read the lines that were added since the last call. Not collective."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")  # the last line may be half written
        self._read += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]


def memcpy_s(nbytes: int) -> float:
    """Time one copy of ``nbytes`` bytes between two warm buffers, in seconds. Not collective."""
    source, target = _buffers(nbytes)
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


@functools.lru_cache(maxsize=1)
def _buffers(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8) + 1
