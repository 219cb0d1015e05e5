"""The ranks of one start, which agents have started: how they begin together, and how they end together."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import LaunchFailed
from ..events import Event
from ..launch.launcher_variables import without_rank
from ..launch.ranks import LOST
from ..launch.secret import TOKEN
from .launch_system import NodeAssignment, NodeLost, Ranks
from .processes import KILL_WAIT_S

if TYPE_CHECKING:
    from .agents import Agents

ANSWER_S = 60.0
"""Deadline for agents to connect. It includes ssh or srun, and a Python from a slow file system."""
_END_S = 5.0  # from SIGTERM to SIGKILL, if a rank has failed
_OTHERS_S = 15.0  # limit for the other ranks to end then
_CLOSED_S = 3.0  # limit for killed ranks to end
_FLUSH_S = 5.0  # limit to print what is left
# Variables of a login or of one host; they are not sent to other hosts.
_STAYS = frozenset({
    "_", "DISPLAY", "HOME", "HOST", "HOSTNAME", "KRB5CCNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL",
    "TERM", "USER", "WINDOWID", "XAUTHORITY",
})  # fmt: skip
_STAY = ("DBUS_", "SSH_", "SUDO_", "TMUX", "XDG_")


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """A process to start: its name, its node, its number there, and its rank; None: it waits for one."""

    name: str
    host: str
    local: int
    rank: int | None


@dataclasses.dataclass(frozen=True)
class Program:
    """What each process runs."""

    argv: list[str]
    directory: str
    environment: dict[str, str]
    size: int  # number of ranks


def processes_of(seats: NodeAssignment) -> list[ProcessSpec]:
    """The processes of the ranks of a start."""
    places = itertools.product(seats.hosts, range(seats.ranks_per_node))
    return [ProcessSpec(f"{host}#{local}", host, local, rank) for rank, (host, local) in enumerate(places)]


def program_of(argv: Sequence[str], env: Mapping[str, str], seats: NodeAssignment) -> Program:
    """What ranks run, in the environment and the directory of this process."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise LaunchFailed(f"ranks have no directory to start in: {error.strerror}") from error
    environment = {**travelling(os.environ), TOKEN: secrets.token_hex(16), **env,
                   "LOCAL_WORLD_SIZE": str(seats.ranks_per_node)}  # fmt: skip
    return Program(list(argv), here, environment, seats.ranks)


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that ranks on other hosts get, as from mpiexec: all but those of this host."""
    return {name: value for name, value in without_rank(environment).items()
            if name not in _STAYS and not name.startswith(_STAY)}  # fmt: skip


class StartedRanks(Ranks):
    """The ranks of one start, see `launch_system.Ranks`. If one fails, or a node is lost, all others are ended.

    Ranks find each other as under torchrun, by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR (the host of
    rank 0) and MASTER_PORT (a free port, another one for each start).
    """

    def __init__(self, agents: Agents, processes: Sequence[ProcessSpec], program: Program):
        self._agents, self._processes, self._program = agents, list(processes), program
        self._hosts = list(dict.fromkeys(process.host for process in processes if process.rank is not None))
        self._living: dict[str, str] = {}  # host of each process, by its name
        self._meets: dict[str, str] = {}
        self._code = 0  # the first one that is not 0
        self._is_ending = self._has_begun = self._is_done = False
        self._over = Event()
        agents.loop.call_soon_threadsafe(self._enter)

    def poll(self) -> int | None:
        """Exit code as in a shell, the first that is not 0. None while ranks run or are being ended."""
        return self._code if self._over.is_set() else None

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        self._agents.loop.call_soon_threadsafe(self._signal, number)

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        self._is_ending = True
        self._agents.loop.call_soon_threadsafe(self._finish)
        if self._over.wait(wait_s):
            return
        self.signal(signal.SIGKILL)
        if not self._over.wait(_CLOSED_S):
            self._agents.loop.call_soon_threadsafe(self._drop_others)
            self._over.wait(KILL_WAIT_S)

    # In the loop

    def _enter(self) -> None:
        self._agents.starts.append(self)
        self._beginning = self._agents.go(self._begin())

    async def _begin(self) -> None:
        """Start the ranks when the agents of all their nodes are there."""
        waiting = {host: self._agents.loop.create_task(self._agents.connected(host)) for host in self._hosts}
        try:
            await asyncio.wait(waiting.values(), timeout=ANSWER_S, return_when=asyncio.FIRST_EXCEPTION)
            wrong = {host: error for host, task in waiting.items() if task.done() and (error := task.exception())}
            for host, error in wrong.items():
                self._fail(error.code if isinstance(error, NodeLost) else LOST, f"no ranks on {host}: {error}")
                return
            if silent := [host for host, task in waiting.items() if not task.done()]:
                self._fail(LOST, f"no answer from {', '.join(silent)} within {ANSWER_S:g} s")
                return
            used, main = self._agents.used, self._hosts[0]
            port = await self._agents.question(main, "port", used=used)
            used.append(port)
            self._meets = {"MASTER_ADDR": self._agents.system.address_of(main), "MASTER_PORT": str(port)}
            await self._start_all()
        except LaunchFailed as error:
            self._fail(getattr(error, "code", LOST), error.message)
        finally:
            for task in waiting.values():
                task.cancel()
            self._has_begun = True
            self._look_over()

    async def _start_all(self) -> None:
        await asyncio.gather(*(self._start(process) for process in self._processes))

    async def _start(self, process: ProcessSpec, kept: int = 0) -> None:
        """Start a process on its node. ``kept``: number of ranks, if it goes on when others are lost; else 0."""
        self._living[process.name] = process.host
        environment = {**self._program.environment, "LOCAL_RANK": str(process.local)}
        if process.rank is not None:  # otherwise it must not join those that have one
            environment |= {"RANK": str(process.rank), "WORLD_SIZE": str(self._program.size), **self._meets}
        try:
            await self._agents.question(
                process.host, "start", name=process.name, argv=self._program.argv, directory=self._program.directory,
                environment=environment, kept=kept,
            )  # fmt: skip
        except NodeLost as error:
            self._living.pop(process.name, None)
            raise NodeLost(f"no rank on {process.host}: {error.message}", error.code) from None

    def _signal(self, number: int, *names: str) -> None:
        by_host = collections.defaultdict[str, list[str]](list)
        for name, host in self._living.items():
            if not names or name in names:
                by_host[host].append(name)
        for host, there in by_host.items():
            self._agents.order(host, "signal", number=number, names=there)

    def _fail(self, code: int, why: str = "") -> None:
        self._code = self._code or code
        if why and not self._is_ending:
            self._agents.printer.say(why)
        self._finish()

    def _finish(self) -> None:
        """End all that runs, within a deadline."""
        if self._is_done:
            return
        self._is_done = True
        if not self._has_begun and asyncio.current_task() is not self._beginning:
            self._beginning.cancel()
        self._signal(signal.SIGTERM)
        if not self._is_ending:  # otherwise whoever waits does it
            self._agents.loop.call_later(_END_S, self._signal, signal.SIGKILL)
            self._agents.loop.call_later(_OTHERS_S, self._drop_others)
        self._look_over()

    def _drop_others(self) -> None:
        """Count nodes as lost whose ranks should have ended."""
        if left := {*self._living.values()}:
            if not self._is_ending:
                self._agents.printer.say(f"the ranks on {', '.join(left)} have not ended {_OTHERS_S:g} s later")
            for host in left:
                self._agents.lose(host, "its ranks do not end")

    def _look_over(self) -> None:
        if self._has_begun and not self._living and self in self._agents.starts:
            self._agents.starts.remove(self)
            self._agents.printer.put(self._over.set)  # when all is printed
            self._agents.loop.call_later(_FLUSH_S, self._over.set)

    def ended(self, name: str, code: int) -> None:
        """Note the end of a process."""
        if self._living.pop(name, None) is None:
            return
        if code:
            self._fail(code)
        self._look_over()

    def host_lost(self, host: str, why: str) -> None:
        """Note that a node is lost, with all that ran there."""
        lost = [name for name, home in self._living.items() if home == host]
        for name in lost:
            del self._living[name]
        if lost:
            self._fail(LOST, f"{host} is lost: {why}")
        self._look_over()

    def host_back(self, host: str) -> None:
        """Note that a node has an agent again."""

    def says(self, name: str, message: dict[str, Any]) -> None:
        """Take what a process says that is kept."""
