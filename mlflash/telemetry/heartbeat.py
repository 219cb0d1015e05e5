"""What a rank says of itself to those who look at its node from outside: a small file in the job's memory directory.

`mlflash run` reads it to tell training that goes on from training that hangs, and a run that came to its end from one
that did not: launchers of MPI return 0 after a lost node. `mlflash top` and metrics show it. It is written by plain
writes to memory, whatever MPI does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UnsafePath
from ..memory.node_directory import NodeDirectory, emulated_nodes, jobs_of
from ..version import __version__

log = logging.getLogger("mlflash")

SHOW_STACKS = signal.SIGRTMIN + 7
"""The signal at which a rank that `mlflash run` has started prints where each of its threads is."""

_NBYTES = 4096  # written at once, so that a reader never finds half of two
_LETTERS = 512  # of a text, each of which may take six bytes
_STATES = ("started", "ended", "failed")
# What each heartbeat says, and what it may say besides: who reads it need not look.
_ALWAYS: dict[str, Any] = {
    "run": str, "rank": int, "ranks": int, "node": str, "pid": int, "state": str, "restored": int | None, "source": str,
    "saved": int | None, "committed": int | None, "times": dict, "beat": int | float,
}  # fmt: skip
_NUMBERS = ("drained", "stall_s", "protect_s", "commit_s", "stalled_s", "nbytes", "held", "saves", "failed", "nodes")


class Heartbeat:
    """The file of this rank; not collective.

    Args:
        memory: where it is.
        rank, size, local_rank: of the world.
        node: name of the node.
        run: which start of `mlflash run` this is; "" without it.
    """

    def __init__(self, memory: NodeDirectory, rank: int, size: int, local_rank: int, node: str, run: str):
        self._lock = threading.Lock()  # the courier writes, too
        self._fd = _open(memory, f"pulse-{local_rank:04d}")
        self._over = False
        self._said: dict[str, Any] = {
            "run": run, "rank": rank, "ranks": size, "node": node, "pid": os.getpid(), "state": "started",
            "restored": None, "source": "", "saved": None, "committed": None, "times": {},
            "version": __version__,
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
            # No `try` here: CPython releases no lock for what is raised on that very line, as the tests do.
            with contextlib.suppress(OSError):  # the memory is full: `_open` said so
                os.pwrite(self._fd, text.ljust(_NBYTES), 0)

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


def _open(memory: NodeDirectory, name: str) -> int:
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


class Heard(NamedTuple):
    """What the ranks of some nodes say of themselves.

    Attributes:
        heartbeats: of the ranks, and whether each is alive.
        unread: why other files cannot be read, in words: of another version of mlflash, or of nobody.
    """

    heartbeats: list[dict[str, Any]]
    unread: list[str]


def why_unread(said: object) -> str:
    """Why what a rank has said of itself cannot be read; "" where it can."""
    if not isinstance(said, dict):
        return "cannot be read: it is no heartbeat"
    wrong = [name for name, kind in _ALWAYS.items() if not isinstance(said.get(name, ...), kind)]
    wrong += [name for name in _NUMBERS if not isinstance(said.get(name), int | float | None)]
    if not wrong:
        times = said["times"]
        wrong += ["state"] * (said["state"] not in _STATES)
        wrong += ["times"] * (not all(isinstance(when, int | float) for when in times.values()))
        wrong += ["times"] * (said["restored"] is not None and "restored" not in times)
    if not wrong:
        return ""
    version = said.get("version")
    by = f"version {version}" if isinstance(version, str) else "a version that does not say which it is"
    return f"cannot be read: written by {by} (this is {__version__}; {', '.join(wrong[:3])})"


def read_heartbeats(memory: str, job: str, node: int | None) -> Heard:
    """Read what the ranks of a node say, and whether each is alive; nothing where the job has no memory there.

    Not collective.

    Args:
        memory, job: where.
        node: number of an emulated node; None: the real one.
    """
    try:
        held = NodeDirectory(memory, job, node, make=False)
    except FileNotFoundError:
        return Heard([], [])
    try:
        heard = Heard([], [])
        for name in held.pulse_names():
            said = read_heartbeat(held, name)
            if isinstance(said, str):
                heard.unread.append(f"{held.path}/{name} {said}")
            elif said is not None:
                heard.heartbeats.append(said | {"alive": _is_alive(said["pid"])})
        return heard
    finally:
        held.close()


def all_heartbeats(memory: str, job: str) -> Heard:
    """The same of this node, and of all that are emulated on it. Not collective."""
    nodes: list[int | None] = [*emulated_nodes(memory, job), None]
    heard = [read_heartbeats(memory, job, node) for node in nodes]
    return Heard(
        [heartbeat for one in heard for heartbeat in one.heartbeats], [text for one in heard for text in one.unread]
    )


def live_jobs(memory: str) -> list[str]:
    """List the jobs of this user that are alive on this node. Not collective."""
    return [
        job
        for job in jobs_of(memory)
        if any(heartbeat["alive"] for heartbeat in all_heartbeats(memory, job).heartbeats)
    ]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def read_heartbeat(memory: NodeDirectory, name: str) -> dict[str, Any] | str | None:
    """Read the file of some rank, or say why it cannot be read; None where it is gone, or empty. Not collective."""
    try:
        fd = memory.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except (UnsafePath, OSError) as error:
        return f"cannot be read: {error}"
    try:
        text = os.pread(fd, _NBYTES, 0)
        if not text.strip(b"\0 "):  # a rank that has just made it
            return None
        said = json.loads(text)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return "cannot be read: it is torn, or no heartbeat"
    finally:
        os.close(fd)
    return why_unread(said) or said
