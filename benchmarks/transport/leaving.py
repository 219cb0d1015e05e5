"""Ends a rank whose MPI hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

LINGER_S = 1.0  # the other rank reaches its deadline too, before MPI notices that we ended


def leave() -> None:
    """End this process at once and remove the shared memory that MPI would leave. This does not return."""
    time.sleep(LINGER_S)
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split()[-1])
        if path.parent == Path("/dev/shm") and path.name.startswith(("mpich_shm", "sm_segment")):
            path.unlink(missing_ok=True)
    os._exit(0)
