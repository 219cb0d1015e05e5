"""A trainer's connection to the agent of its node (`launch.seat` says what it can be asked for)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from . import agent_process
from .courier_process import CourierEnd
from .line_client import LineClient, Lost, Refused
from .lines import pack

log = logging.getLogger("mlflash")

_STARTS = 3  # agents that may end while this process connects to them


class AgentLost(ConnectionError):
    """The agent of this node has ended, and its couriers with it."""


class AgentRefused(OSError):
    """The agent cannot do what it was asked to do."""


class HubLost(ConnectionError):
    """The place where ranks meet cannot be reached, or no longer."""


@dataclasses.dataclass(frozen=True)
class Departure:
    """A rank that has left, and why."""

    rank: int
    why: str  # a clause to follow a colon
    ends_job: bool  # whether the other ranks must end, too, as after MPI_Abort

    def __str__(self) -> str:
        return f"rank {self.rank} has left the job: {self.why}"


class AgentClient:
    """The connection of this process for couriers of one kind. Close it; it may be closed twice.

    Any thread may use it, but no process that was forked from this one. All calls raise AgentLost if the agent has
    ended, DeadlineExceeded if it has not answered, AgentRefused if it says why not, HubLost if it has no hub.

    Args:
        entry_point: ``module:function`` of what couriers run, importable without the trainer's script.
        environment: of this process, with the variables of its launcher.
        timeout_s: limit for the imports of the agent, which may come from a slow file system.
        job, memory: those of the agent (`agent_process.names_of`).
        mpi: whether couriers may initialize MPI. Without it no MPI needs to be installed.
        rank_cores: those of this rank, for `courier_cores`; "": couriers run where their trainers do.
        output: where couriers print to, open until `close`; None: where this process prints to.

    Attributes:
        pid: of the agent.
        vendor: the MPI that couriers load, as mpi4py names it; "" without MPI.
        up: epochs whose courier has initialized MPI.
        ended: couriers that have ended, by epoch.
        over: epochs that are over on some rank.
        departed: the ranks that have left, in the order in which this one was told.
        hub_lost: why there is no hub; None: there is one, as far as was heard.
    """

    def __init__(self, entry_point: str, environment: Mapping[str, str], timeout_s: float, *, job: str = "",
                 memory: str = "", mpi: bool = True, rank_cores: str = "", output: IO[Any] | None = None):  # fmt: skip
        self.up: set[str] = set()
        self.ended: dict[str, CourierEnd] = {}
        self.over: set[str] = set()
        self.departed: list[Departure] = []
        self.hub_lost: str | None = None
        self._owner = os.getpid()
        own = agent_process.own_environment(environment)
        hello = {"entry": entry_point, "mpi": mpi, "environment": own, "directory": _directory(), "umask": _umask(),
                 "cores": sorted(os.sched_getaffinity(self._owner)), "pid": self._owner,
                 "rank_cores": rank_cores}  # fmt: skip
        names = agent_process.names_of(job, memory, environment)
        end = time.monotonic() + timeout_s
        for attempt in range(_STARTS):
            sock, self._name = agent_process.connect(names, environment)
            self._lines = LineClient(sock, "the agent of this node", self._hear)
            try:
                self._greet(hello, output, max(0.0, end - time.monotonic()))
                break
            except AgentLost:  # it was just ending
                if attempt == _STARTS - 1:
                    raise
            except BaseException:
                self._lines.close()
                raise

    def _greet(self, hello: dict[str, Any], output: IO[Any] | None, timeout_s: float) -> None:
        with contextlib.ExitStack() as opened:
            try:
                pidfd = os.pidfd_open(self._owner)
            except OSError as refused:
                raise AgentRefused(f"no process can be watched here (pidfd_open: {refused.strerror}): couriers need "
                                   "Linux 5.3, and a container whose profile allows it") from None  # fmt: skip
            opened.callback(os.close, pidfd)
            outputs = [_open(fd if output is None else output.fileno(), opened) for fd in (1, 2)]
            reply = self.ask("hello", timeout_s, descriptors=[*outputs, pidfd], **hello)
        self._seat, self.vendor, self.pid = reply["seat"], str(reply["vendor"]), int(reply["pid"])

    @property
    def is_lost(self) -> bool:
        return self._lines.why is not None

    def ask(self, what: str, timeout_s: float, check: Callable[[], None] = lambda: None, **fields: Any) -> Any:
        """Ask the agent for something, see `LineClient.ask`."""
        if os.getpid() != self._owner:
            raise RuntimeError("a process that was forked from the trainer has no agent")
        try:
            return self._lines.ask(what, timeout_s, check, **fields)
        except Lost as error:
            raise AgentLost(f"{error}; couriers end with it") from None
        except Refused as error:
            if error.answer.get("lost"):
                raise HubLost(str(error)) from None
            raise AgentRefused(f"the agent of this node refused to {what}: {error}") from None

    def tell(self, what: str, **fields: Any) -> None:
        self._lines.say({"id": 0, "do": what, **fields})

    def channel(self, number: int) -> socket.socket:
        """Make the connection to the next courier, whose number is above that of the last one. Raises AgentLost."""
        try:
            sock = agent_process.connect_again(self._name)
            sock.sendall(pack({"channel": self._seat, "number": number}))
            return sock
        except OSError as error:
            raise AgentLost(f"the agent of this node has ended: {error}") from None

    def wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something holds of the attributes; return whether it does. Raises AgentLost if it cannot."""
        if not self._lines.news.wait_for(lambda: holds() or self.is_lost, timeout_s):
            return False
        if not holds():
            raise AgentLost(f"the agent of this node has ended: {self._lines.why}")
        return True

    def close(self) -> None:
        """End the connection. A courier that still runs ends soon after."""
        if os.getpid() == self._owner:
            self._lines.close()

    def _hear(self, news: dict[str, Any]) -> None:
        match news:
            case {"up": str(epoch)}:
                self.up.add(epoch)
            case {"ended": str(epoch), **how}:
                self.ended[epoch] = CourierEnd(**how)
            case {"over": str(epoch)}:
                self.over.add(epoch)
            case {"departed": dict(departure)}:
                self.departed.append(Departure(**departure))
            case {"lost": str(why)}:
                self.hub_lost = why
            case {"log": str(text)}:
                log.error("%s", text)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


def _umask() -> int:
    """The umask of this process. To ask the system for it would be to set it, for all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), 0o022)


def _open(fd: int, opened: contextlib.ExitStack) -> int:
    """The descriptor, or one of nothing if it is closed."""
    try:
        os.fstat(fd)
        return fd
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        opened.callback(os.close, nothing)
        return nothing
