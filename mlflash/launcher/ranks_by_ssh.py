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
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..events import Event
from .host_agent import LOST, READY, SILENCE_S, Spec
from .launch_system import Ranks
from .line_stream import Lines, Sink
from .processes import KILL_WAIT_S, kill, signal_group, spawn

ANSWER_S = 60.0
"""Deadline for all hosts to answer. It includes the connection and a Python from a slow file system."""
_BEAT_S = SILENCE_S / 12
_OTHERS_S = 15.0  # limit for the other hosts to end after one has failed
_CLOSED_S = 3.0  # limit for agents to kill their ranks after their input was closed
_FLUSH_S = 5.0  # limit to write the remaining output
_READY = re.compile(rb"^" + READY.encode() + rb"(\d+)\r?\n", re.MULTILINE)


@dataclasses.dataclass
class HostOfRanks:
    """A host that has ranks.

    Attributes:
        name: as given.
        command: starts the agent there.
        spec: what the agent starts.
    """

    name: str
    command: Sequence[str]
    spec: Spec


class Agent:
    """An agent that was started, with the orders not yet sent to it and its answers.

    Args:
        host: where to start what.
        is_again: whether the host was lost. Then its output is not passed on before the agent has answered.
    """

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
        """The descriptor for orders; -1 if it is closed."""
        pipe = self.process.stdin
        return -1 if pipe is None or pipe.closed else pipe.fileno()

    def close_input(self) -> None:
        """Close its input. The agent then kills its ranks."""
        self.unsent.clear()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def end(self) -> int:
        """Note that it has ended. Return the exit code as in a shell."""
        code: int = self.process.wait()
        self.close_input()
        os.close(self.pidfd)
        self.is_over = True
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Close all descriptors of an agent that was killed."""
        self.close_input()
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class RanksBySsh(Ranks):
    """The ranks of one start, see `launch_system.Ranks`.

    Args:
        hosts: those that have ranks, in order of rank.
        shared: a function from a free port of the first host to environment variables for all ranks.

    Raises:
        LaunchFailed: the remote shell does not exist.
    """

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
        """Send a signal to all ranks."""
        self._tell({"signal": number})

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        """End all ranks that can be reached, and the remote shells. May be called twice.

        Args:
            wait_s: seconds from SIGTERM to SIGKILL.
        """
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
        """Wait until something happens. Send agents their orders, or a sign of life."""
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
        """Print the output of the ranks, line by line, until it ends."""
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
