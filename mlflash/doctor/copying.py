"""How fast bytes come into slots, and what would make it faster."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

from .findings import Finding, fine
from .mounts import Mount

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


def pages(mount: Mount | None) -> Finding:
    """Say how large the pages of the memory file system are."""
    options = [] if mount is None else mount.options.split(",")
    huge = next((option.removeprefix("huge=") for option in options if option.startswith("huge=")), "never")
    if huge in ("always", "within_size"):
        return fine("pages", "huge ones, where they fit")
    where = "/dev/shm" if mount is None else mount.point
    how = f"mount -o remount,huge=within_size {where}"
    return fine("pages", "of 4 KiB: restoring is faster with huge ones (as root: {how})", how=how)


def copying() -> Finding:
    """Measure copies of 8 MiB with the C library as it is, and with stores that go past the caches. Not collective."""
    now_gbs = _measured(dict(os.environ))
    if platform.machine() != "x86_64" or TUNABLE in os.environ.get("GLIBC_TUNABLES", ""):
        return judge_copying(now_gbs, now_gbs)
    others = [one for one in os.environ.get("GLIBC_TUNABLES", "").split(":") if one]
    return judge_copying(now_gbs, _measured({**os.environ, "GLIBC_TUNABLES": ":".join([*others, TUNABLE])}))


def judge_copying(now_gbs: float, past_gbs: float) -> Finding:
    """Compare how fast copies are with how fast they might be.

    Args:
        now_gbs: 10^9 bytes per second.
        past_gbs: the same past the caches, where a tensor is not wanted.
    """
    if past_gbs < _WORTH * now_gbs:
        return fine("copying", "{now_gbs} in pieces of 8 MiB", now_gbs=now_gbs)
    return fine("copying", "{now_gbs} in pieces of 8 MiB; {past_gbs} with GLIBC_TUNABLES={tunable} in the job's script",
                now_gbs=now_gbs, past_gbs=past_gbs, tunable=TUNABLE)  # fmt: skip


def _measured(env: dict[str, str]) -> float:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True,
                         text=True, timeout=_DEADLINE_S, check=True)  # fmt: skip
    return float(ran.stdout)
