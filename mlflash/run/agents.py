"""The agents of all nodes of a run: one loop on one thread, with one port to which each agent connects.

Agents are started once, and serve all starts of a job. One that is lost is started anew when its node is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import LaunchFailed
from ..launch.cause import Cause
from ..launch.handshake import STRANGERS, Port
from ..launch.interfaces import own_address
from ..launch.lines import Connection, listener_at
from ..launch.own_process import allow
from ..launch.rank_processes import BEATS, LARGEST_NBYTES, LOST
from ..text import listed
from .launch_systems import Process, System
from .processes import KILL_WAIT_S

if TYPE_CHECKING:
    from .started_ranks import StartedRanks

log = logging.getLogger("mlflash")
T = TypeVar("T")

ANSWER_S = 60.0
"""Deadline for agents to connect. It includes ssh or srun, and a Python from a slow file system."""
SILENCE_S = 60.0
"""Seconds without a sign of life after which a side counts as lost, if nothing else is said."""
_BEHIND_S = 8.0  # how much longer to wait for the other agents once half of them have connected
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two checks whether a lost node is back
_END_S = 5.0  # from SIGTERM to SIGKILL, if a rank has failed
_COURIERS_S = 20.0  # limit for agents to end: couriers commit what trainers have handed over
_LOOK_S = 0.02  # whether all have ended
_FLUSH_S = 5.0  # limit to print what is left
_NAMED = 8  # nodes named in a line
_OTHER_DESCRIPTORS = 256  # of this process: strangers, its output, its log


@dataclasses.dataclass(frozen=True)
class Guard:
    """What the agent of a node other than ``here`` runs if this process is lost, with what on its standard input."""

    here: str
    argv: list[str]
    stdin: str


class NodeLost(LaunchFailed):
    """A node has no agent, or its agent refuses something; ``code`` is the exit code that stands for it."""

    def __init__(self, host: str, why: str, code: int = LOST):
        super().__init__(why)
        self.host, self.code = host, code


class Printer:
    """Prints on a thread of its own, because a terminal or a log may hang."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflash-printer", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def say(self, text: str) -> None:
        self.put(lambda: print(f"mlflash run: {text}", file=sys.stderr, flush=True))

    def close(self) -> None:
        """Print the rest, as far as that is possible soon."""
        self._calls.put(None)
        self._thread.join(_FLUSH_S)


def _write(fd: int, text: bytes) -> None:
    """Write all of it. If nobody reads any more, it is dropped."""
    left = memoryview(text)
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(fd, left) :]


class _Node:
    """What is known of a node and its agent."""

    def __init__(self, name: str):
        self.name = name
        self.connection: Connection | None = None
        self.heard = 0.0
        self.starter: Process | None = None  # of its agent
        self.pause_s = _PAUSE_S
        self.again: asyncio.TimerHandle | None = None  # when it is tried again
        self.awaited: list[asyncio.Future[Connection]] = []
        self.questions: dict[int, asyncio.Future[Any]] = {}


class Agents:
    """Has an agent on each node of a system, and asks the nodes. A context manager.

    Not collective; its public methods up to `ask` are for other threads than that of the loop, all others for the loop.

    Args:
        system: has the nodes.
        lost_s: a side that is silent for so long is lost.
        greeting: what agents are told besides, see `launch.agent`.
        guard: what one agent runs if this process is lost.
    """

    def __init__(self, system: System, lost_s: float = SILENCE_S,
                 greeting: Mapping[str, Any] | None = None, guard: Guard | None = None):  # fmt: skip
        self.system, self.hosts, self.printer, self._lost_s = system, system.hosts, Printer(), lost_s
        self.used: list[int] = []  # ports of earlier starts
        self.token = secrets.token_hex(16)
        self.address = ("", 0)  # where agents connect
        self._greeting, self._guard, self._guarded = dict(greeting or {}), guard, ""
        self._nodes = {host: _Node(host) for host in self.hosts}
        self._starters: dict[Process, list[str]] = {}  # that have not ended, and the nodes of their agents
        self._numbers, self._shown = itertools.count(1), set[tuple[str, str]]()
        self.starts: list[StartedRanks] = []
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="mlflash-agents", daemon=True)

    def __enter__(self) -> Agents:
        if why_not := allow(2 * len(self._nodes) + _OTHER_DESCRIPTORS):
            raise LaunchFailed(f"mlflash run {why_not}")
        self._thread.start()
        try:
            self.call(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End all agents, and the ranks that are left. May be called twice."""
        if self.loop.is_closed():
            return
        self.call(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.printer.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def ask(self, hosts: Sequence[str], what: str, timeout_s: float, behind_s: float | None = None, **fields: Any
            ) -> dict[str, Any]:  # fmt: skip
        """Ask nodes (see `tools.status_process`). Return the answers of those that have one.

        Args:
            behind_s: how much longer to wait for the others once half of the nodes have answered; None: no limit but
                the deadline.
        """
        asked = {host: self.question(host, what, **fields) for host in hosts}
        answers, wrong = self.call(self._gather(asked, timeout_s, behind_s))
        for host, why in wrong.items():
            if (host, why) not in self._shown:
                self._shown.add((host, why))
                log.warning("%s does not answer: %s", host, why)
        return answers

    async def _gather(self, asked: Mapping[str, Coroutine[Any, Any, T]], timeout_s: float, behind_s: float | None
                      ) -> tuple[dict[str, T], dict[str, str]]:  # fmt: skip
        """Wait for something of each node. Return what has come, and why nothing has come of the other nodes."""
        tasks = {host: self.loop.create_task(work) for host, work in asked.items()}
        pending, end = {*tasks.values()}, self.loop.time() + timeout_s
        while pending and (left_s := end - self.loop.time()) > 0:
            _, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            come = [task for task in tasks.values() if task not in pending and task.exception() is None]
            if behind_s is not None and 2 * len(come) >= len(tasks):
                end, behind_s = min(end, self.loop.time() + behind_s), None
        answers, wrong = dict[str, T](), dict[str, str]()
        for host, task in tasks.items():
            if task in pending:
                task.cancel()
                wrong[host] = f"it has not answered within {timeout_s:g} s"
            elif (error := task.exception()) is not None:
                wrong[host] = error.message if isinstance(error, LaunchFailed) else repr(error)
            else:
                answers[host] = task.result()
        return answers, wrong

    # In the loop

    async def question(self, host: str, what: str, **fields: Any) -> Any:
        """Ask an agent; wait for it to be there, and to answer. Raises LaunchFailed."""
        connection = await self.connected(host)
        node, number, answer = self._nodes[host], next(self._numbers), self.loop.create_future()
        node.questions[number] = answer
        connection.send({"id": number, "do": what, **fields})
        try:
            return await answer
        finally:
            node.questions.pop(number, None)

    async def connected(self, host: str) -> Connection:
        """Wait for the agent of a node; start it if nothing does. Raises NodeLost: it did not come."""
        node = self._nodes[host]
        if node.connection is not None:
            return node.connection
        if node.starter is None:
            self._start_agents([host], is_again=True)
        waiting: asyncio.Future[Connection] = self.loop.create_future()
        node.awaited.append(waiting)
        return await waiting

    def go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have the loop do something beside."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def order(self, host: str, what: str, **fields: Any) -> None:
        """Tell an agent to do something. Nothing happens if it is lost."""
        if (connection := self._nodes[host].connection) is not None:
            connection.send({"do": what, **fields})

    def is_there(self, host: str) -> bool:
        return self._nodes[host].connection is not None

    def lose(self, host: str, why: str, code: int = LOST) -> None:
        """Count a node as lost. Its agent notices, at the latest when it has heard nothing for long enough."""
        node = self._nodes[host]
        connection, node.connection = node.connection, None
        if connection is not None:
            connection.close(why)
        for waiting in [*node.awaited, *node.questions.values()]:
            if not waiting.done():
                waiting.set_exception(NodeLost(host, why, code))
        node.awaited = []
        if self._is_closing:
            return
        starter, node.starter = node.starter, None
        if starter is not None and self._starters.get(starter) == [host]:
            self._end_agents(starter)
        for start in list(self.starts) if connection is not None else ():
            start.host_lost(host, why)
        self._guarded = "" if host == self._guarded else self._guarded  # its next agent must be told again
        self._choose_guard()
        node.pause_s = _PAUSE_S if connection is not None else min(2 * node.pause_s, _LONGEST_PAUSE_S)
        node.again = self.loop.call_later(node.pause_s, self._start_again, node)

    def _start_again(self, node: _Node) -> None:
        if node.starter is None and not self._is_closing:
            self._start_agents([node.name], is_again=True)

    async def _open(self) -> None:
        self._port = Port(self.token, self._meet, LARGEST_NBYTES, STRANGERS + len(self.hosts))
        await self._port.listen(listener_at(own_address(self.system.is_here, os.environ)))
        self.address = self._port.address
        self._greeting |= {"address": self.address, "token": self.token, "lost_s": self._lost_s}
        self._beats = self.go(self._beat())
        self._start_agents(self.hosts)
        # A node without an agent is missed when it is needed.
        await self._gather({host: self.connected(host) for host in self.hosts}, ANSWER_S, _BEHIND_S)

    def _start_agents(self, hosts: list[str], is_again: bool = False) -> None:
        try:
            # Of a node that is not back yet, nothing is said each time.
            more = {"stderr": subprocess.DEVNULL} if is_again else {}
            started = self.system.start_agents(hosts, self._greeting, **more)
        except LaunchFailed as error:
            for host in hosts:
                self.loop.call_soon(self.lose, host, error.message)
            return
        for starter, names in started.items():
            self._starters[starter] = names
            for name in names:
                self._nodes[name].starter = starter
            pidfd = os.pidfd_open(starter.pid)
            self.loop.add_reader(pidfd, self._note_end, starter, pidfd)
            self.loop.call_later(ANSWER_S, self._give_up, starter)

    def _end_agents(self, starter: Process) -> None:
        self.loop.run_in_executor(None, self.system.end_agents, starter)

    def _note_end(self, starter: Process, pidfd: int) -> None:
        self.loop.remove_reader(pidfd)
        os.close(pidfd)
        code = starter.wait()
        code = code if code >= 0 else 128 - code
        for host in self._starters.pop(starter):
            if self._nodes[host].starter is starter:
                self.lose(host, f"{self.system.program} ended with exit code {code}", code or LOST)

    def _give_up(self, starter: Process) -> None:
        for host in self._starters.get(starter, ()):
            if self._nodes[host].starter is starter and not self.is_there(host):
                self.lose(host, f"it has not answered within {ANSWER_S:g} s")

    def _meet(self, connection: Connection, hello: dict[str, Any]) -> None:
        node = self._nodes[hello["host"]]
        if node.connection is not None or self._is_closing:
            raise ValueError("this node has an agent")
        node.connection, node.heard, node.pause_s = connection, self.loop.time(), _PAUSE_S
        connection.heard = lambda message: self._hear(node, message)
        connection.lost = lambda why: self._note_loss(node, connection, why)
        for waiting in node.awaited:
            if not waiting.done():
                waiting.set_result(connection)
        node.awaited = []
        self._choose_guard()
        for start in self.starts:
            start.host_back(node.name)

    def _choose_guard(self) -> None:
        """Have one agent of another node know what to do if this process, or its node, is lost."""
        if (guard := self._guard) is None:
            return
        others = [host for host in self.hosts if host != guard.here and self.is_there(host)]
        if others and self._guarded not in others:
            self._guarded = others[-1]
            self.order(self._guarded, "guard", argv=guard.argv, stdin=guard.stdin)

    def _note_loss(self, node: _Node, connection: Connection, why: str) -> None:
        if node.connection is connection:
            self.lose(node.name, f"the connection to its agent has ended: {why}")

    def _hear(self, node: _Node, message: dict[str, Any]) -> None:
        node.heard = self.loop.time()
        match message:
            case {"id": int(number)}:
                if (answer := node.questions.get(number)) is None or answer.done():
                    return
                if "error" in message:
                    answer.set_exception(NodeLost(node.name, str(message["error"]), int(message.get("code", 1))))
                else:
                    answer.set_result(message["is"])
            case {"ended": str(name), "code": int(code), "cause": {"kind": kind, "text": text, "evidence": evidence}}:
                for start in list(self.starts):
                    start.ended(name, code, Cause(str(kind), str(text), str(evidence)))
            case {"prints": str(text), "to": 1 | 2 as fd, "pipe": int(pipe)}:
                self.printer.put(lambda: self._print(node, fd, text, pipe))
            case {"move": str(host), "number": int(number)}:
                self.order(node.name, "moves", number=number, why_not=self._move(host or node.name))
            case {"from": str(name), "says": dict(message)}:
                for start in self.starts:
                    start.says(name, message)

    def _move(self, host: str) -> str:
        """Have all ranks leave a node. Return why not; "": they will."""
        if host not in self._nodes:
            return f"{host} is no node of this job, which has {listed(self.hosts, _NAMED)}"
        return self.starts[-1].move(host) if self.starts else "no ranks run now"

    def _print(self, node: _Node, fd: int, text: str, pipe: int) -> None:
        _write(fd, text.encode(errors="surrogateescape"))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(lambda: self.order(node.name, "printed", pipe=pipe))

    async def _beat(self) -> None:
        while True:
            now = self.loop.time()
            for node in self._nodes.values():
                if node.connection is None:
                    continue
                node.connection.send({})
                if now - node.heard > self._lost_s:
                    self.lose(node.name, f"nothing was heard from {node.name} for {self._lost_s:g} s")
            await asyncio.sleep(self._lost_s / BEATS)

    async def _close(self) -> None:
        self._is_closing = True
        if not self._greeting.get("address"):
            return
        self._port.close()
        is_whole = all(map(self.is_there, self.hosts))
        for node in self._nodes.values():
            self.order(node.name, "bye")
            if node.again is not None:
                node.again.cancel()
        for starter, hosts in self._starters.items():
            if not any(map(self.is_there, hosts)):
                self._end_agents(starter)
        # A step of srun does not end by itself if one of its nodes is dead.
        await self._starters_end(_COURIERS_S if is_whole else _END_S)
        for starter in self._starters:
            self._end_agents(starter)
        await self._starters_end(KILL_WAIT_S)
        self._beats.cancel()
        for node in self._nodes.values():
            if node.connection is not None:
                node.connection.close()
        await self.loop.shutdown_default_executor()

    async def _starters_end(self, timeout_s: float) -> None:
        end = self.loop.time() + timeout_s
        while self._starters and self.loop.time() < end:
            await asyncio.sleep(_LOOK_S)
