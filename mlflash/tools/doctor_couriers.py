"""Couriers: those that run on this node, and whether this MPI can start some without a launcher."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..config import DISABLE
from ..errors import pip_install
from ..launch.launcher_variables import as_torchrun, without_rank
from ..launch.mpi_library import LIBRARY
from ..memory.courier_process import trainer_of, works_for
from ..text import last_words
from .doctor_findings import Finding, fine, warning

_SOON_S = 6  # a courier ends within this time after its trainer
_RANKS, _LONGEST_S, _LOOK_S = 2, 45.0, 0.02  # of a trial
_LENGTH = 200  # characters of its output that are shown
_PROGRAM = """
import sys
import numpy
from mlflash import Checkpointer
try:
    with Checkpointer(job="doctor", redundancy="none", timeout_s=40, strict=True, log="", metrics="",
                      drain_every=0) as checkpointer:
        checkpointer.save(1, {"numbers": numpy.ones(8)}).wait()
        print(checkpointer.report()["mpi"])
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


def running() -> dict[int, int]:
    """Find the couriers of this user on this node, and for whom each works: itself, if its trainer has ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if path.stat().st_uid == os.getuid() and trainer_of(path) is not None:
                found[int(path.name)] = works_for(int(path.name))
    return found


def couriers_here(_: object) -> Iterator[Finding]:
    """Look for couriers on this node that have lost their trainer."""
    if left := [pid for pid, trainer in running().items() if trainer == pid]:
        yield warning("couriers here", "processes {pids} remain, but their trainers have ended",
                      f"they end within {_SOON_S} s after they have committed the last save; if not: kill -9 {{pids}}",
                      pids=" ".join(map(str, sorted(left))))  # fmt: skip


def try_couriers(environment: Mapping[str, str], memory: str) -> Finding:
    """Let two ranks on this host save with couriers that no launcher started. Not collective."""
    start = time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(prefix="mlflash-doctor-", dir=memory, ignore_cleanup_errors=True) as own_memory,
        open(os.path.join(own_memory, "output"), "w+") as output,
    ):
        given = {**without_rank(environment), "MLFLASH_MEMORY": own_memory, DISABLE: ""}
        ranks = [
            subprocess.Popen([sys.executable, "-c", _PROGRAM], cwd="/", stdin=subprocess.DEVNULL, stdout=output,
                             stderr=subprocess.STDOUT,
                             env=as_torchrun(given, rank, _RANKS, rank, "127.0.0.1", port))
            for rank in range(_RANKS)
        ]  # fmt: skip
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            if time.monotonic() > start + _LONGEST_S:
                break
            time.sleep(_LOOK_S)
        for rank in ranks:  # what it would print later follows from the failure of another rank
            rank.kill()
            rank.wait()
        output.seek(0)
        printed = output.read()
    last = last_words(printed, "it does not end and prints nothing")
    if not any(rank.returncode for rank in ranks):
        return fine("couriers", "two ranks saved without a launcher after {seconds}, by {mpi}",
                    seconds=f"{time.monotonic() - start:.1f} s", mpi=last[:_LENGTH])  # fmt: skip
    advice = f"{pip_install('mpich')} into this environment, or name the library of your cluster's MPI in {LIBRARY}"
    if "pidfd_open" in printed:
        advice = "allow pidfd_open and pidfd_send_signal in the container's profile"
    return warning("couriers", "couriers could not save: {last}", advice, last=last[:_LENGTH])
