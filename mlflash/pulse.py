"""What a rank says of itself to those who look at its node from outside: a small file in the job's memory directory.

`mlflash run` reads it to tell training that goes on from training that hangs, and a run that came to its end from one
that did not: launchers of MPI return 0 after a lost node. `mlflash top` and metrics show it. It is written by plain
writes to memory, whatever MPI does.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .errors import UnsafePath
from .node_memory import NodeMemory, emulated_nodes, jobs_of

log = logging.getLogger("mlflash")

SHOW_STACKS = signal.SIGRTMIN + 7
"""The signal at which a rank that `mlflash run` has started prints where each of its threads is."""

_NBYTES = 4096  # written at once, so that a reader never finds half of two
_LETTERS = 512  # of a text, each of which may take six bytes


class Pulse:
    """The file of this rank; not collective.

    Args:
        memory: where it is.
        rank, size, local_rank: of the world.
        node: name of the node.
        run: which start of `mlflash run` this is; "" without it.
    """

    def __init__(self, memory: NodeMemory, rank: int, size: int, local_rank: int, node: str, run: str):
        self._lock = threading.Lock()  # the courier writes, too
        self._fd = _open(memory, f"pulse-{local_rank:04d}")
        self._over = False
        self._said: dict[str, Any] = {
            "run": run, "rank": rank, "ranks": size, "node": node, "pid": os.getpid(), "state": "started",
            "restored": None, "source": "", "saved": None, "committed": None, "times": {},
        }  # fmt: skip
        if run:
            faulthandler.register(SHOW_STACKS, sys.__stderr__ or 2)
        self.beat("made")

    @property
    def is_over(self) -> bool:
        """Whether the last word was said."""
        return self._over

    def note(self, **news: Any) -> None:
        """Have something new to say with the next beat."""
        with self._lock:
            self._said.update(_short(news))

    def beat(self, event: str, **news: Any) -> None:
        """Say that the training gets on, and what is new; the first time of each event stays."""
        with self._lock:
            if self._fd < 0:
                return
            now = round(time.time(), 3)
            self._said["times"].setdefault(event, now)
            self._said.update(_short(news), beat=now)
            text = json.dumps(self._said, separators=(",", ":")).encode()
            try:
                os.pwrite(self._fd, text.ljust(_NBYTES), 0)
            except OSError:  # the memory is full: `_open` said so
                pass

    def end(self, state: str) -> None:
        """Say the last word: "ended", or "failed". May be called twice; the first one counts."""
        self.beat(state, state=state)
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._over = -1, True

    def leave(self) -> None:
        """Say nothing more in a process that was forked; what the file says is the parent's. Not collective."""
        fd, self._fd, self._over = self._fd, -1, True
        if fd >= 0:
            os.close(fd)


def _open(memory: NodeMemory, name: str) -> int:
    """Open the file of a rank, with room for all it will ever say; -1 where that cannot be: training goes on."""
    try:
        fd = memory.open(name, os.O_RDWR | os.O_CREAT)
    except UnsafePath as error:
        log.warning("this rank cannot say how it gets on, to mlflash run and top: %s", error)
        return -1
    try:
        os.posix_fallocate(fd, 0, _NBYTES)
    except OSError as error:
        log.warning("this rank cannot say how it gets on, to mlflash run and top, as long as %s is full: %s",
                    memory.path, error)  # fmt: skip
    return fd


def _short(news: dict[str, Any]) -> dict[str, Any]:
    """So that all of it has room: times to the microsecond, the last letters of long paths."""
    return {
        name: round(value, 6) if isinstance(value, float) else value[-_LETTERS:] if isinstance(value, str) else value
        for name, value in news.items()
    }


def read_pulses(memory: str, job: str, node: int | None) -> list[dict[str, Any]]:
    """Read what the ranks of a node say, and whether each is alive; nothing where the job has no memory there.

    Not collective.

    Args:
        memory, job: where.
        node: number of an emulated node; None: the real one.
    """
    try:
        held = NodeMemory(memory, job, node, make=False)
    except FileNotFoundError:
        return []
    try:
        said = [read_pulse(held, name) for name in held.pulse_names()]
        return [pulse | {"alive": _is_alive(int(pulse["pid"]))} for pulse in said if pulse is not None]
    finally:
        held.close()


def all_pulses(memory: str, job: str) -> list[dict[str, Any]]:
    """The same of this node, and of all that are emulated on it. Not collective."""
    nodes: list[int | None] = [*emulated_nodes(memory, job), None]
    return [pulse for node in nodes for pulse in read_pulses(memory, job, node)]


def live_jobs(memory: str) -> list[str]:
    """List the jobs of this user that are alive on this node. Not collective."""
    return [job for job in jobs_of(memory) if any(pulse["alive"] for pulse in all_pulses(memory, job))]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def read_pulse(memory: NodeMemory, name: str) -> dict[str, Any] | None:
    """Read the file of some rank; None where it is gone or makes no sense. Not collective."""
    try:
        fd = memory.open(name, os.O_RDONLY)
    except (FileNotFoundError, UnsafePath):
        return None
    try:
        said: dict[str, Any] = json.loads(os.pread(fd, _NBYTES, 0))
        return said
    except ValueError:
        return None
    finally:
        os.close(fd)
