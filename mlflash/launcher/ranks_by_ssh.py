"""The ranks of one start on hosts that a remote shell reaches: one shell and one `host_agent` for each host.

One thread talks to the agents and notices when they end. Another one passes on their output. If the ranks of one host
fail or the host is lost, the ranks of the other hosts are ended within a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ..errors import LaunchFailed
from ..events import Event
from ..wireup.launcher_variables import without_rank
from ..wireup.own_process import running
from .host_agent import LOST, READY, SILENCE_S, Lines, Sink, Spec
from .launch_system import NodeAssignment, Ranks
from .on_hosts import OnHosts
from .processes import KILL_WAIT_S, kill, signal_group, spawn

AGENT = "mlflash.launcher.host_agent"
"""The module that is run on each host."""
# Variables of a login or of one host; they are not sent to other hosts.
_STAYS = frozenset({
    "_", "DISPLAY", "HOME", "HOST", "HOSTNAME", "KRB5CCNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL",
    "TERM", "USER", "WINDOWID", "XAUTHORITY",
})  # fmt: skip
_STAY = ("DBUS_", "SSH_", "SUDO_", "TMUX", "XDG_")
_OF_PYTHON = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")  # the agent itself may need them
ANSWER_S = 60.0  # deadline for all hosts to answer. It includes the connection and a Python from a slow file system
_BEAT_S = SILENCE_S / 12
_OTHERS_S = 15.0  # limit for the other hosts to end after one has failed
_CLOSED_S = 3.0  # limit for agents to kill their ranks after their input was closed
_FLUSH_S = 5.0  # limit to write the remaining output
_READY = re.compile(rb"^" + READY.encode() + rb"(\d+)\r?\n", re.MULTILINE)


class OnSsh(OnHosts):
    """Starts ranks by a remote shell, without a launcher of MPI, see `launch_system.Launcher`.

    Ranks find each other as under torchrun, by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR (the host of
    rank 0) and MASTER_PORT (a free port, another one for each start). Their couriers still use MPI (`wireup`).
    """

    def __init__(self, hosts: Sequence[str], shell: str = "ssh"):
        super().__init__(hosts, shell)
        self._used: list[int] = []  # ports of earlier starts

    def start(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> RanksBySsh:
        specs = self._specs(seats, argv, env)
        hosts = [HostOfRanks(host, self._command(host), spec) for host, spec in zip(seats.hosts, specs, strict=True)]
        return RanksBySsh(hosts, self._meets(seats.hosts))

    def _specs(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> list[Spec]:
        environment = {**travelling(os.environ), **env}
        per_node = seats.ranks_per_node
        try:
            here = os.getcwd()
        except OSError as error:
            raise LaunchFailed(f"ranks have no directory to start in: {error.strerror}") from error
        return [Spec(list(argv), environment, here, number * per_node, per_node, seats.ranks, self._used,
                     local_size=per_node) for number in range(len(seats.hosts))]  # fmt: skip

    def _meets(self, hosts: Sequence[str]) -> Callable[[int], dict[str, str]]:
        """A function from a free port of the first host to the variables with which ranks find each other."""
        main = socket.gethostname() if hosts[0] in self._local else address_of(hosts[0])
        main = "127.0.0.1" if set(hosts) <= self._local else main

        def meets(port: int) -> dict[str, str]:
            self._used.append(port)
            return {"MASTER_ADDR": main, "MASTER_PORT": str(port)}

        return meets

    def with_mpi(self, words: Sequence[str]) -> list[str]:
        return [*running("mlflash.command_line.run_on_ranks"), *words]

    def _command(self, host: str) -> list[str]:
        agent = running(AGENT)
        if host in self._local:
            return agent
        needed = [f"{name}={os.environ[name]}" for name in _OF_PYTHON if name in os.environ]
        return [self._shell, host, shlex.join(["env", *needed, *agent] if needed else agent)]


def address_of(host: str) -> str:
    """The name or address of a host that is written as ssh takes it.

    Example: ``me@node1`` and ``ssh://me@node1:2222`` are node1, ``me@fe80::1`` and ``[fe80::1]`` are fe80::1.
    """
    if host.startswith("ssh://"):
        return urlsplit(host).hostname or host
    name = host.rpartition("@")[2]
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that ranks on other hosts get, as from mpiexec: all but those of this host."""
    return {name: value for name, value in without_rank(environment).items()
            if name not in _STAYS and not name.startswith(_STAY)}  # fmt: skip


@dataclasses.dataclass
class HostOfRanks:
    """A host that has ranks."""

    name: str
    command: Sequence[str]
    spec: Spec


class Agent:
    """An agent that was started, with the orders not yet sent to it and its answers."""

    def __init__(self, host: HostOfRanks, is_again: bool = False):
        self.host, self.is_again, self.began = host, is_again, time.monotonic()
        self.process: subprocess.Popen[bytes] = spawn(
            host.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)  # if its cable is cut, it reads nothing
        self.pidfd = os.pidfd_open(self.process.pid)
        self.unsent = bytearray(line(dataclasses.asdict(host.spec)))
        self.port: int | None = None
        self.is_over = False

    @property
    def stdin(self) -> int:
        pipe = self.process.stdin
        return -1 if pipe is None or pipe.closed else pipe.fileno()

    def close_input(self) -> None:
        """Close its input. The agent then kills its ranks."""
        self.unsent.clear()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def end(self) -> int:
        code: int = self.process.wait()
        self.close_input()
        os.close(self.pidfd)
        self.is_over = True
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        self.close_input()
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class RanksBySsh(Ranks):
    """The ranks of one start, see `launch_system.Ranks`."""

    def __init__(self, hosts: Sequence[HostOfRanks], shared: Callable[[int], dict[str, str]]):
        self._shared = shared
        self._agents: list[Agent] = []
        self._environment: dict[str, str] = {}  # variables that all hosts share
        self._over, self._lock = Event(), threading.Lock()
        self._code = 0  # the first one that is not 0
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._is_ending = self._is_closing = False  # `end` was called, and was not enough
        self._is_done = False  # only the end of the agents is waited for
        try:
            for host in hosts:
                self._agents.append(Agent(host))
        except BaseException:
            for agent in self._agents:
                kill(agent.process)
                agent.close()
            os.close(self._woken)
            os.close(self._wake)
            raise
        self._sinks = Sink(1), Sink(2)
        self._printing: list[threading.Thread] = []
        self._print(self._agents)
        threading.Thread(target=self._speak, name="mlflash-agents", daemon=True).start()

    def poll(self) -> int | None:
        """Exit code as in a shell, the first that is not 0. None while ranks run or are being ended."""
        return self._code if self._over.is_set() else None

    def signal(self, number: int) -> None:
        self._tell({"signal": number})

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        self._is_ending = True
        self.signal(signal.SIGTERM)
        if self._over.wait(wait_s):
            return
        self._is_closing = True
        self._wake_up()
        if self._over.wait(_CLOSED_S):
            return
        left = [agent for agent in self._agents if not agent.is_over]
        for agent in left:
            signal_group(agent.process, signal.SIGKILL)
        for agent in left:
            kill(agent.process)
        self._over.wait(KILL_WAIT_S)

    def _tell(self, order: dict[str, Any]) -> None:
        with self._lock:
            for agent in self._agents:
                if not agent.is_over:
                    agent.unsent += line(order)
        self._wake_up()

    def _wake_up(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # it has been woken up already
            if not self._over.is_set():
                os.write(self._wake, b"!")

    # Orders to the agents

    def _speak(self) -> None:
        try:
            self._see_through()
        finally:
            for agent in self._agents:
                if not agent.is_over:
                    signal_group(agent.process, signal.SIGKILL)
            for thread in self._printing:
                thread.join(_FLUSH_S)
            with self._lock:
                self._over.set()
                os.close(self._woken)
                os.close(self._wake)

    def _see_through(self) -> None:
        """Start the ranks when all hosts have answered, and make sure that they end together."""
        answers = time.monotonic() + ANSWER_S
        ends: float | None = None
        is_started = is_killed = False
        while not all(agent.is_over for agent in self._agents):
            now = time.monotonic()
            if not is_started and not self._code:
                if all(agent.port is not None for agent in self._agents if agent.host.spec.count):
                    is_started = True
                    self._environment = self._shared(self._agents[0].port or 0)
                    self._tell({"start": self._environment})
                elif now >= answers:
                    there = [agent for agent in self._agents if agent.host.spec.count]
                    silent = ", ".join(agent.host.name for agent in there if agent.port is None)
                    self._fail(LOST, f"no answer from {silent} within {ANSWER_S:g} s")
            if (self._code or self._is_done) and ends is None:
                self._tell({"end": True})
                ends = now + _OTHERS_S
            elif ends is not None and now >= ends:
                if is_killed:
                    return  # a process that SIGKILL does not end is left behind
                self._kill_others()
                is_killed, ends = True, now + KILL_WAIT_S
            moments = (answers, ends, self._look_for_lost_hosts(now))
            waits = [_BEAT_S] + [end - now for end in moments if end is not None and end > now]
            self._wait(min(waits))

    def _look_for_lost_hosts(self, now: float) -> float | None:
        """Check whether lost hosts are back, in a class that can use them; return when to do so next."""

    def _wait(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for agent in self._agents:
                if agent.is_over:
                    continue
                selector.register(agent.pidfd, selectors.EVENT_READ, agent)
                if agent.unsent and agent.stdin >= 0:
                    selector.register(agent.stdin, selectors.EVENT_WRITE, agent)
            ready = selector.select(timeout_s)
        for key, events in ready:
            if key.data is None:
                os.read(self._woken, 4096)
            elif events & selectors.EVENT_WRITE:
                self._send(key.data)
            else:
                self._note_end(key.data)
        with self._lock:
            for agent in self._agents:
                if self._is_closing:
                    agent.close_input()
                elif not ready and not agent.unsent and not agent.is_over:
                    agent.unsent += line({})

    def _send(self, agent: Agent) -> None:
        with self._lock:
            if agent.stdin < 0:  # it has just ended
                return
            try:
                del agent.unsent[: os.write(agent.stdin, agent.unsent)]
            except BlockingIOError:
                pass
            except OSError:  # it has ended; its pidfd tells
                agent.close_input()

    def _note_end(self, agent: Agent) -> None:
        code = agent.end()
        name, shell = agent.host.name, os.path.basename(agent.host.command[0])
        if agent.port is None and not self._code:
            self._fail(code or LOST, f"no ranks on {name}: {shell} ended with exit code {code}")
        elif code == LOST and not self._code:
            self._fail(code, f"{name} is lost, or a rank there ended with this code: {shell} ended with {code}")
        else:
            self._code = self._code or code

    def _fail(self, code: int, why: str) -> None:
        self._code = self._code or code
        self._say(why)

    def _say(self, text: str) -> None:
        if not self._is_ending:
            print(f"mlflash run: {text}", file=sys.stderr, flush=True)

    def _kill_others(self) -> None:
        left = [agent for agent in self._agents if not agent.is_over]
        names = ", ".join(agent.host.name for agent in left)
        self._say(f"the ranks on {names} have not ended {_OTHERS_S:g} s later: the remote shells are killed")
        for agent in left:
            agent.close_input()
            signal_group(agent.process, signal.SIGKILL)

    # The output of the agents

    def _print(self, agents: Sequence[Agent]) -> None:
        self._printing = [thread for thread in self._printing if thread.is_alive()]
        self._printing.append(threading.Thread(target=self._pass_on, args=(agents,), name="mlflash-lines", daemon=True))
        self._printing[-1].start()

    def _pass_on(self, agents: Sequence[Agent]) -> None:
        with selectors.DefaultSelector() as selector:
            for agent in agents:
                for pipe, sink in zip((agent.process.stdout, agent.process.stderr), self._sinks, strict=True):
                    assert pipe is not None
                    selector.register(pipe, selectors.EVENT_READ, (agent, pipe, Lines(), sink))
            while selector.get_map():
                for key, _ in selector.select():
                    agent, pipe, lines, sink = key.data
                    printed = os.read(key.fd, 1 << 16)
                    text = lines.add(printed) if printed else lines.rest()
                    if agent.port is None and (found := _READY.search(text)):
                        text = text[: found.start()] + text[found.end() :]
                        agent.port = int(found[1])
                        self._wake_up()
                    if agent.port is not None or not agent.is_again:
                        sink.write(text)
                    if not printed:
                        selector.unregister(pipe)
                        pipe.close()


def line(order: dict[str, Any]) -> bytes:
    """An order as bytes, as it is sent to an agent."""
    return json.dumps(order).encode() + b"\n"
