"""How fast a process copies bytes into slots, and what would make it faster."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
import tempfile

from ..memory import huge_pages
from .findings import Finding, fine

TUNABLE = "glibc.cpu.x86_non_temporal_threshold=1048576"
_WORTH = 1.25
_DEADLINE_S = 30.0
_PROGRAM = """
import time
import numpy as np
pieces, target = [np.ones(8 << 20, np.uint8) for _ in range(8)], np.ones((8, 8 << 20), np.uint8)
seconds = []
for _ in range(7):
    start = time.perf_counter()
    for piece, into in zip(pieces, target):
        np.copyto(into, piece)
    seconds.append(time.perf_counter() - start)
print(target.nbytes / sorted(seconds)[3] / 1e9)
"""


def pages(memory: str) -> Finding:
    """Check whether slots in the memory file system get huge pages. Not collective."""
    step = huge_pages.huge_nbytes()
    with tempfile.TemporaryFile(dir=memory) as file:
        file.truncate(max(step, mmap.PAGESIZE))
        return judge_pages(huge_pages.fill(file.fileno(), huge_pages.map_file(file.fileno(), step)) if step else False)


def judge_pages(huge: bool) -> Finding:
    """Say what follows if slots get huge pages, or not."""
    if huge:
        return fine("pages", "huge pages")
    return fine("pages", "4 KiB; with huge pages (Linux 6.1 or newer) slots are made and read in half the time")


def copying() -> Finding:
    """Measure copies of 8 MiB with the C library as it is, and with stores that bypass the caches. Not collective."""
    now_gbs = _measured(dict(os.environ))
    if platform.machine() != "x86_64" or TUNABLE in os.environ.get("GLIBC_TUNABLES", ""):
        return judge_copying(now_gbs, now_gbs)
    others = [one for one in os.environ.get("GLIBC_TUNABLES", "").split(":") if one]
    return judge_copying(now_gbs, _measured({**os.environ, "GLIBC_TUNABLES": ":".join([*others, TUNABLE])}))


def judge_copying(now_gbs: float, past_gbs: float) -> Finding:
    """Compare the speed of copies with the speed that they could have.

    Args:
        now_gbs: speed as it is, in 10^9 bytes per second.
        past_gbs: speed with stores that bypass the caches, which do not need the tensor.
    """
    if past_gbs < _WORTH * now_gbs:
        return fine("copying", "{now_gbs} in pieces of 8 MiB", now_gbs=now_gbs)
    return fine("copying", "{now_gbs} in pieces of 8 MiB; {past_gbs} with GLIBC_TUNABLES={tunable} in the job's script",
                now_gbs=now_gbs, past_gbs=past_gbs, tunable=TUNABLE)  # fmt: skip


def _measured(env: dict[str, str]) -> float:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], env={**env, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                         text=True, timeout=_DEADLINE_S, check=True)  # fmt: skip
    return float(ran.stdout)
