"""What a rank reports about itself to programs that look at its node from outside: a small file in the job's memory.

`mlflash run` reads it to tell training that continues from training that hangs, and a run that ended from one that did
not: launchers of MPI return 0 after a lost node. `mlflash top` and metrics show it. It is written by plain writes to
memory, whatever MPI does. The trainer and the courier of a rank each write a part of it, even if the other is dead: see
`heartbeat_format`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from typing import Any, NamedTuple

from ..errors import UnsafePath
from ..memory.courier_process import read_stat
from ..memory.node_directory import NodeDirectory, emulated_nodes, jobs_of
from ..version import __version__
from .heartbeat_format import FORMAT, PART_NBYTES, carried_on, courier_part, encode, is_orphan, together, trainer_part

log = logging.getLogger("mlflash")

SHOW_STACKS = signal.SIGRTMIN + 7
"""The signal at which trainer and courier of a rank that `mlflash run` has started print where each thread is."""

_LETTERS = 512  # most characters of a text; each may take six bytes


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """The rank that a heartbeat belongs to: plain values, which the trainer makes and sends to its courier.

    Attributes:
        rank, size, local_rank: of the world.
        node: name of the node.
        run: which start of `mlflash run` this is; "" without it.
        start: identifies this trainer and its Checkpointer: what couriers of others have left in the file is passed
            over.
    """

    rank: int
    size: int
    local_rank: int
    node: str
    run: str
    start: str = dataclasses.field(default_factory=lambda: os.urandom(8).hex())


class _Part:
    """The part of the file that one process of a rank writes; not collective."""

    def __init__(self, memory: NodeDirectory, facts: RankFacts, at: int, is_written: bool):
        self._lock = threading.Lock()  # a courier that is a thread writes, too
        self._fd, self._at = _open(memory, f"pulse-{facts.local_rank:04d}") if is_written else -1, at
        self._over = False
        self._said: dict[str, Any] = {
            "format": FORMAT, "version": __version__, "start": facts.start, "rank": facts.rank, "pid": os.getpid(),
            "pid_namespace": _pid_namespace(), "state": "started", "times": {},
        }  # fmt: skip
        if facts.run:
            faulthandler.register(SHOW_STACKS, sys.__stderr__ or 2)

    @property
    def is_over(self) -> bool:
        """Whether its last message was written."""
        return self._over

    def note(self, **news: Any) -> None:
        """Note something that will be written with the next beat."""
        with self._lock:
            self._said.update(_short(news))

    def beat(self, event: str = "", **news: Any) -> None:
        """Report that this process makes progress, and what is new; the first time of each event stays."""
        with self._lock:
            if self._fd < 0:
                return
            now = round(time.time(), 3)
            if event:
                self._said["times"].setdefault(event, now)
            self._said.update(_short(news), beat=now)
            self._write()

    def _write(self) -> None:
        text = encode(self._said)
        # No `try` here: CPython does not release a lock if an exception is raised on exactly that line, as in the
        # tests.
        with contextlib.suppress(OSError):  # memory is full, which `_open` has reported
            os.pwrite(self._fd, text, self._at)

    def _close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._over = -1, True

    def leave(self) -> None:
        """Write nothing more in a forked process; what the file says belongs to the parent."""
        fd, self._fd, self._over = self._fd, -1, True
        if fd >= 0:
            os.close(fd)


class TrainerHeartbeat(_Part):
    """The heartbeat of this rank's trainer: its beat is the progress of the training.

    Args:
        memory: where it is.
        facts: of this rank.
        is_written: False leaves the file of a dead job as it is: a command opens its memory.
    """

    def __init__(self, memory: NodeDirectory, facts: RankFacts, is_written: bool = True):
        super().__init__(memory, facts, 0, is_written)
        self._said |= {"run": facts.run, "ranks": facts.size, "node": facts.node, "restored": None, "source": "",
                       "saved": None}  # fmt: skip
        self.beat("made")

    def flush(self) -> None:
        """Write what was noted, with the time of the last beat: only training itself makes progress."""
        with self._lock:
            if self._fd >= 0:
                self._write()

    def end(self, state: str) -> None:
        """Write the last message: "ended", or "failed". May be called twice; the first one counts."""
        self.beat(state, state=state)
        self._close()


class CourierHeartbeat(_Part):
    """The heartbeat of this rank's courier; it continues when the trainer is dead.

    A courier that replaces another one of the same trainer continues from what that one has reported.

    Args:
        memory: where it is.
        facts: of this rank.
        is_written: see `TrainerHeartbeat`.

    Attributes:
        before: what the courier before it has reported, by name; empty if there was none.
    """

    def __init__(self, memory: NodeDirectory, facts: RankFacts, is_written: bool = True):
        super().__init__(memory, facts, PART_NBYTES, is_written)
        self.before: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # there is no part, or it could not be opened
            self.before = carried_on(courier_part(os.pread(self._fd, PART_NBYTES, self._at)), facts.start, facts.rank)
        self._said |= {"committed": None, "saves": 0, "failed": 0} | self.before
        self.beat()

    def end(self) -> None:
        """Report that the courier ends, and did not die. May be called twice."""
        self.beat(state="ended")
        self._close()


def _open(memory: NodeDirectory, name: str) -> int:
    """Open the file of a rank, with room for everything it will contain; -1 if that fails: training continues."""
    try:
        fd = memory.open(name, os.O_RDWR | os.O_CREAT)
    except UnsafePath as error:
        log.warning("this rank cannot report its progress to mlflash run and mlflash top: %s", error)
        return -1
    try:
        os.posix_fallocate(fd, 0, 2 * PART_NBYTES)
    except OSError as error:
        log.warning("this rank cannot report its progress to mlflash run and mlflash top while %s is full: %s",
                    memory.path, error)  # fmt: skip
    return fd


def _short(news: dict[str, Any]) -> dict[str, Any]:
    """Shorten values so that everything has room: times to the microsecond, the last letters of long paths."""
    return {
        name: round(value, 6) if isinstance(value, float) else value[-_LETTERS:] if isinstance(value, str) else value
        for name, value in news.items()
    }


class Heard(NamedTuple):
    """What the ranks of some nodes report about themselves.

    Attributes:
        heartbeats: of the ranks, and whether each is alive.
        unread: why other files cannot be read, in words: another version of mlflash wrote them, or they are no
            heartbeats.
    """

    heartbeats: list[dict[str, Any]]
    unread: list[str]


def read_heartbeats(memory: str, job: str, node: int | None) -> Heard:
    """Read what the ranks of a node report, and whether each is alive; nothing if the job has no memory there.

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
            said, unread = read_heartbeat(held, name)
            heard.unread.extend(f"{held.path}/{name} {text}" for text in unread)
            if said is not None:
                heard.heartbeats.append(said)
        return heard
    finally:
        held.close()


def all_heartbeats(memory: str, job: str) -> Heard:
    """The same for this node, and for all nodes that are emulated on it."""
    nodes: list[int | None] = [*emulated_nodes(memory, job), None]
    heard = [read_heartbeats(memory, job, node) for node in nodes]
    return Heard(
        [heartbeat for one in heard for heartbeat in one.heartbeats], [text for one in heard for text in one.unread]
    )


def live_jobs(memory: str) -> list[str]:
    """List the jobs of this user that are alive on this node, even if only a courier without its trainer is."""
    return [
        job
        for job in jobs_of(memory)
        if any(one["alive"] or is_orphan(one) for one in all_heartbeats(memory, job).heartbeats)
    ]


def _pid_namespace() -> int:
    """The number of this process's pid namespace: the same pid in another one is another process."""
    return os.stat("/proc/self/ns/pid").st_ino


def _pid_here(part: dict[str, Any]) -> int:
    return int(part["pid"]) if part["pid_namespace"] == _pid_namespace() else 0


def _is_alive(pid: int) -> bool:
    if pid == 0:  # of another container: nothing is known of it
        return True
    try:
        return read_stat(pid).state not in ("Z", "X")
    except OSError:
        return False


def read_heartbeat(memory: NodeDirectory, name: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Read the file of some rank.

    Returns:
        What its trainer and its courier report together, see `heartbeat_format.together`; None if the trainer's part is
        missing, blank, or cannot be read. And, in words, why parts cannot be read.
    """
    try:
        fd = memory.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None, []
    except (UnsafePath, OSError) as error:
        return None, [f"cannot be read: {error}"]
    try:
        text = os.pread(fd, 2 * PART_NBYTES, 0)
    except OSError as error:
        return None, [f"cannot be read: {error.strerror}"]
    finally:
        os.close(fd)
    trainer, courier = trainer_part(text[:PART_NBYTES]), courier_part(text[PART_NBYTES:])
    if not isinstance(trainer, dict):
        return None, [] if trainer is None else [trainer]
    unread = [f"{courier} in what the courier says"] if isinstance(courier, str) else []
    heard = courier if isinstance(courier, dict) else None
    for part in (trainer, heard):
        if part is not None:
            part["pid"] = _pid_here(part)
    courier_alive = heard is not None and _is_alive(heard["pid"])
    return together(trainer, heard, _is_alive(trainer["pid"]), courier_alive), unread
