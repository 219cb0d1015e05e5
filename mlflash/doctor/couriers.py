"""Couriers: those that run on this node, and whether this MPI can start some without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..config import DISABLE
from ..human_readable.wording import last_words
from ..memory.courier_process import parent_and_trainer
from ..wireup.launcher_variables import as_torchrun, without_rank
from .context import Context
from .findings import Finding, fine, warning

_SOON_S = 4  # a courier ends within this time after its trainer
_RANKS, _LONGEST_S, _LOOK_S = 2, 45.0, 0.02  # of a trial
_LENGTH = 200  # characters of its output that are shown
_PROGRAM = """
import sys
import numpy
from mlflash import Checkpointer
try:
    with Checkpointer(job="doctor", courier="process", redundancy="none", timeout_s=40, strict=True, log="",
                      metrics="", drain_every=0) as checkpointer:
        checkpointer.save(1, {"numbers": numpy.ones(8)}).wait()
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


class Running(NamedTuple):
    """A zygote (the process that forks couriers) or a courier of this user.

    Attributes:
        pid: its process ID.
        parent: process ID of its parent.
        trainer: process ID of its trainer. This is a zygote's parent while the trainer lives.
        jobs: the jobs that it holds the lock of.
    """

    pid: int
    parent: int
    trainer: int
    jobs: tuple[str, ...] = ()


def running() -> list[Running]:
    """List the zygotes and couriers of this user on this node. Not collective."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            pids = parent_and_trainer(path)
            if pids is not None and path.stat().st_uid == os.getuid():
                found.append(Running(int(path.name), *pids, _locked_by(path)))
        except OSError:  # it has just ended
            continue
    return sorted(found)


def _locked_by(process: Path) -> tuple[str, ...]:
    """Return the jobs whose lock file a process has open."""
    jobs = set()
    for descriptor in (process / "fd").iterdir():
        try:
            file = descriptor.readlink()
        except OSError:
            continue
        if file.name == "lock" and any("mlflash-" in part for part in file.parts):
            jobs.add(file.parts[-3] if file.parent.name.startswith("node") else file.parent.name)
    return tuple(sorted(jobs))


def judge_running(processes: Sequence[Running]) -> Iterator[Finding]:
    """Say which couriers run on a node, and which of them have lost their trainer."""
    pids = {process.pid for process in processes}
    zygotes = [process for process in processes if process.parent not in pids]
    left = {zygote.pid for zygote in zygotes if zygote.parent != zygote.trainer}
    if left:
        orphans = [process for process in processes if process.parent in left]
        jobs = ", ".join(sorted({job for orphan in orphans for job in orphan.jobs}))
        yield warning(
            "couriers here",
            "processes {pids} remain, but their trainers have ended" + "; they lock {jobs}" * bool(jobs),
            f"they end within {_SOON_S} s after they have committed the last save; if not: kill -9 {{pids}}",
            pids=" ".join(map(str, sorted(left | {orphan.pid for orphan in orphans}))), jobs=jobs,
        )  # fmt: skip
    elif processes:
        yield fine("couriers here", "couriers run, each with its trainer: {couriers}",
                   couriers=len(processes) - len(zygotes))  # fmt: skip


def try_couriers(context: Context) -> Finding:
    """Let two ranks on this host save with couriers that no launcher started. Not collective."""
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as free_port:
        port = free_port.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(prefix="mlflash-doctor-", dir=context.settings.memory) as memory,
        open(os.path.join(memory, "output"), "w+") as output,
    ):
        environment = {**without_rank(context.environment), "MLFLASH_MEMORY": memory, DISABLE: ""}
        ranks = [
            subprocess.Popen([sys.executable, "-c", _PROGRAM], cwd="/", stdin=subprocess.DEVNULL, stdout=output,
                             stderr=subprocess.STDOUT,
                             env=as_torchrun(environment, rank, _RANKS, rank, "127.0.0.1", port))
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
    if not any(rank.returncode for rank in ranks):
        return fine("couriers", "two ranks saved without a launcher after {seconds}",
                    seconds=f"{time.monotonic() - start:.1f} s")  # fmt: skip
    last = last_words(printed, "it does not end and prints nothing")
    advice = "pip install 'mlflash[mpich]' into this environment"
    if "pidfd_open" in printed:
        advice = "allow pidfd_open and pidfd_send_signal in the container's profile"
    return warning("couriers", "this MPI does not start without its launcher: {last}",
                   advice + "; or set MLFLASH_COURIER=thread and start with its own mpiexec or srun",
                   last=last[:_LENGTH])  # fmt: skip
