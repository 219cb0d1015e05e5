"""Ranks whose processes stay when others are lost. A remote shell or srun starts them, and a service talks to them.

All processes and the agents of their hosts connect to the service, which does what `membership` decides. Messages are
those of `wireup.frames`. The first message of a connection has the token, and the name of the process or of the host.

A process sends ``{"ready": true}`` when it waits for a rank, ``{"left": round}`` when it has left a round, ``{"here":
round}`` when it has reached a round and may have to wait there for others, ``{"trains": round, "step", "times"}`` when
it has begun to train, and ``{"done": round}`` when its training has ended. Rank 0 also sends ``{"text": round, "what",
"is"}``, which is for all. The service sends ``{"seat": {"round", "rank", "size", "lost_s", "ready_s"}}``, ``{"lost":
round, "ranks", "why"}`` and those texts.

An agent sends ``{}`` as a sign of life, and ``{"ended": name, "code"}``. The service sends it ``{"one": name,
"local"}`` (start another spare process), ``{"kill": name}``, and ``{}`` as a sign of life. An agent that hears nothing
kills its processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import LaunchFailed
from ..human_readable.wording import named
from ..wireup.frames import BadFrame, Frames, Outbox, receive_ready
from ..wireup.interfaces import own_address
from ..wireup.own_process import allow, running
from ..wireup.strangers import MOST, Strangers
from .host_agent import BEATS, LARGEST_NBYTES, LOST
from .launch_system import NodeAssignment, RunLog
from .membership import Deadlines, Member, Membership
from .on_slurm import STEPS, OnSlurm, beside
from .processes import signal_group
from .ranks_by_ssh import AGENT, ANSWER_S, Agent, HostOfRanks, OnSsh, RanksBySsh, line

_WRITES_S = 2.0  # limit to write the remaining events at the end
_STRANGER_S = 10.0  # limit for a new connection to say who it is
_OTHER_DESCRIPTORS = 128  # of this process: its output, its log, shells
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two checks whether a lost host is back


class _Connection:
    """A connection to a process or an agent. At first it is not known to which."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.frames, self.out = Frames(LARGEST_NBYTES), Outbox(sock)
        self.name = self.host = ""
        self.is_awaited = False  # the selector waits until the socket takes more
        self.heard = time.monotonic()


class MemberService:
    """Serves one start of a job, on one thread; another writes events, because log and terminal may hang. Close it.

    On its thread it calls ``over`` when there is no next round or all have finished, and ``lost`` with a lost host.
    """

    def __init__(self, address: str, members: Sequence[Member], deadlines: Deadlines, run_log: RunLog,
                 over: Callable[[], None], lost: Callable[[str], None]):  # fmt: skip
        # A process that is replaced may still be connected when its successor is.
        if why_not := allow(2 * len(members) + len({one.host for one in members}) + MOST + _OTHER_DESCRIPTORS):
            raise LaunchFailed(f"mlflash run {why_not}")
        self.token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._run_log, self._over, self._lost, self._lost_s = run_log, over, lost, deadlines.lost_s
        self.membership = Membership(members, self, deadlines, time.monotonic())
        self._connections: list[_Connection] = []
        self._untold: dict[str, list[dict[str, Any]]] = {}  # messages for processes that have not connected yet
        self._hosts = {member.name: member.host for member in members}
        self._gone: set[str] = set()  # hosts that are lost
        self._fresh = 0
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._strangers = Strangers(listener, self._selector, _STRANGER_S, self._drop)
        self._is_closed = False
        self._notes: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_down, name="mlflash-journal", daemon=True)
        self._thread = threading.Thread(target=self._serve, name="mlflash-members", daemon=True)
        for thread in (self._writer, self._thread):
            thread.start()

    def host_lost(self, host: str, why: str) -> None:
        self._call(lambda: self._lose(host, why))

    def close(self) -> None:
        self._is_closed = True
        self._call(lambda: None)
        self._thread.join()
        self._notes.put(None)
        self._writer.join(_WRITES_S)

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")

    # What `Membership` calls

    def tell(self, name: str, message: dict[str, Any]) -> None:
        found = [one for one in self._connections if one.name == name]
        if found:
            found[-1].out.send(message)
        else:
            self._untold.setdefault(name, []).append(message)

    def kill(self, name: str) -> None:
        self._tell_agent(self._hosts[name], {"kill": name})

    def start(self, host: str, local: int) -> str:
        self._fresh += 1
        name = f"{host}#{local}.{self._fresh}"
        self._hosts[name] = host
        self._tell_agent(host, {"one": name, "local": local})
        return name

    def note(self, event: str, **fields: Any) -> None:
        self._notes.put((event, fields))

    def _write_down(self) -> None:
        while (one := self._notes.get()) is not None:
            event, fields = one
            self._run_log.note(event, **fields)
            if event == "host_back":
                print(f"mlflash run: {fields['host']} is back: spares wait there", file=sys.stderr, flush=True)
            if event == "recovered":
                ranks, why, step, took = (fields[name] for name in ("lost", "why", "step", "seconds"))
                lost = f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} lost ({why})"
                print(f"mlflash run: {lost}; all train on after step {step}, {took:.2f} s later", file=sys.stderr,
                      flush=True)  # fmt: skip

    def _tell_agent(self, host: str, message: dict[str, Any]) -> None:
        for one in self._connections:
            if one.host == host:
                one.out.send(message)

    # The loop

    def _serve(self) -> None:
        beat_s = self._lost_s / BEATS
        next_beat = time.monotonic()
        was_over = False
        try:
            while not self._is_closed:
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + beat_s
                    self._beat(now)
                self.membership.look(now)
                if self.membership.over and not was_over:
                    was_over = True
                    self._over()
                self._wait(max(0.0, min(next_beat, self.membership.until) - time.monotonic()))
        finally:
            for one in self._connections:
                one.sock.close()
            self._strangers.close()
            self._selector.close()
            os.close(self._woken)
            os.close(self._wake)

    def _beat(self, now: float) -> None:
        for one in list(self._connections):
            if one.host:
                one.out.send({})
                if now - one.heard > self._lost_s:
                    self._lose(one.host, f"nothing was heard from {one.host} for {self._lost_s:g} s")
        self._strangers.look()

    def _wait(self, timeout_s: float) -> None:
        for one in self._connections:
            if one.is_awaited != bool(one.out.unsent):
                one.is_awaited = bool(one.out.unsent)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.is_awaited else 0)
                self._selector.modify(one.sock, events, one)
        ready = self._selector.select(timeout_s)
        # Read what a process has sent before its agent's message that the process has ended.
        for key, events in sorted(ready, key=lambda one: bool(one[0].data and one[0].data.host)):
            if key.fd == self._woken:
                os.read(self._woken, 4096)
                while not self._calls.empty():
                    self._calls.get()()
            elif key.data is None:
                self._strangers.accept(self._made)
            elif key.data in self._connections:  # an earlier event of this loop may have dropped it
                if events & selectors.EVENT_WRITE:
                    key.data.out.send_rest()
                if events & selectors.EVENT_READ:
                    self._read(key.data)

    def _made(self, sock: socket.socket) -> _Connection:
        one = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, one)
        self._connections.append(one)
        return one

    def _read(self, one: _Connection) -> None:
        if (received := receive_ready(one.sock)) is None:
            return
        if not received:
            self._drop(one)
            if one.host:
                self._lose(one.host, f"the connection to {one.host} has ended")
            return
        one.heard = time.monotonic()
        one.frames.add(received)
        try:
            for message in one.frames.messages():
                self._take(one, message)
        except (BadFrame, KeyError, OverflowError, TypeError, ValueError) as error:
            print(f"mlflash run: {one.name or one.host or 'an unknown process'} sent a message that cannot be read: "
                  f"{error!r}", file=sys.stderr, flush=True)  # fmt: skip
            self._drop(one)

    def _take(self, one: _Connection, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if not one.name and not one.host:
            if not secrets.compare_digest(str(message["token"]), self.token):
                raise ValueError("not the token of this job")
            one.name, one.host = str(message.get("name", "")), str(message.get("host", ""))
            self._strangers.known(one)
            for told in self._untold.pop(one.name, []) if one.name else []:
                one.out.send(told)
            if one.host in self._gone:
                self._gone.remove(one.host)
                self.note("host_back", host=one.host)
                self.membership.host_back(one.host)
        elif one.host:
            if "ended" in message:
                code = int(message["code"])
                self.membership.ended(message["ended"], code, how_it_ended(code), now)
        elif "ready" in message:
            self.membership.ready(one.name, now)
        elif "left" in message:
            self.membership.left(one.name, int(message["left"]), now)
        elif "here" in message:
            self.membership.here(one.name, int(message["here"]))
        elif "trains" in message:
            number, step, times = int(message["trains"]), int(message["step"]), dict(message["times"])
            self.membership.trains(one.name, number, step, times, now)
        elif "done" in message:
            self.membership.done(one.name, int(message["done"]))
        elif "text" in message:
            self.membership.text(one.name, int(message["text"]), message["what"], message["is"])

    def _lose(self, host: str, why: str) -> None:
        if host in self._gone:
            return
        self._gone.add(host)
        for one in [one for one in self._connections if one.host == host or self._hosts.get(one.name) == host]:
            self._drop(one)
        self.membership.host_lost(host, why, time.monotonic())
        self._lost(host)

    def _drop(self, one: _Connection) -> None:
        if one in self._connections:
            self._connections.remove(one)
            self._selector.unregister(one.sock)
            one.sock.close()
            self._strangers.closed(one)


def how_it_ended(code: int) -> str:
    """How a process ended, in words, from its exit code as in a shell."""
    return f"its process was killed by signal {code - 128}" if code > 128 else f"its process ended with code {code}"


class OnKeptHosts(OnSsh):
    """Starts ranks by a remote shell. Ranks that `train` starts stay when others are lost, and spares wait for ranks.

    Args:
        hosts: the nodes. Each node without ranks gets as many spare processes as other nodes have ranks.
        spares: number of spare processes on the nodes with ranks, if there are no other nodes.
    """

    def __init__(self, hosts: Sequence[str], shell: str, spares: int, deadlines: Deadlines, run_log: RunLog):
        super().__init__(hosts, shell)
        self._spares, self._deadlines, self._run_log = spares, deadlines, run_log

    def train(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> KeptRanks:
        others = [host for host in self._hosts if host not in seats.hosts]
        specs = dict(zip(seats.hosts, self._specs(seats, argv, env), strict=True))
        some = next(iter(specs.values()))
        waiting = dict.fromkeys(others, seats.ranks_per_node) | dict.fromkeys(seats.hosts, 0)
        if not others:
            for host in itertools.islice(itertools.cycle(seats.hosts), self._spares):
                waiting[host] += 1
        specs |= {host: dataclasses.replace(some, first=-1, count=0) for host in others}
        alone = set(specs) <= self._local
        address = "127.0.0.1" if alone else own_address(False, os.environ)
        hosts = [(HostOfRanks(host, self._command(host), spec), waiting[host]) for host, spec in specs.items()]
        return KeptRanks(hosts, self._meets(seats.hosts), address, self._deadlines, self._run_log)


class KeptBySteps(OnKeptHosts):
    """Starts ranks that stay, and spares, by one step of Slurm per node.

    If a node dies, only its own step ends. If a node comes back, the other steps are not affected.
    """

    def __init__(self, slurm: OnSlurm, spares: int, deadlines: Deadlines, run_log: RunLog):
        super().__init__(slurm.hosts(), "srun", spares, deadlines, run_log)
        self._extra_words = [f"--job-name={STEPS}kept", *slurm.extra]
        self._local = set()

    def _command(self, host: str) -> list[str]:
        return beside([host], self._extra_words, running(AGENT))


@dataclasses.dataclass
class _Lost:
    """A lost host: when to check whether it is back, and how long to wait after that."""

    at: float
    pause_s: float


class KeptRanks(RanksBySsh):
    """The ranks of one start, see `launch_system.Ranks`. The start goes on as long as lost ranks are replaced.

    It checks from time to time whether a lost host is back, and then starts spare processes there.
    """

    replaces = True

    @property
    def rounds(self) -> int:
        return self._service.membership.round

    def __init__(self, hosts: Sequence[tuple[HostOfRanks, int]], shared: Callable[[int], dict[str, str]],
                 address: str, deadlines: Deadlines, run_log: RunLog):  # fmt: skip
        self._lost: dict[str, _Lost] = {}
        members = []
        for host, waiting in hosts:
            for local in range(host.spec.count + waiting):
                rank = host.spec.first + local if local < host.spec.count else None
                members.append(Member(f"{host.name}#{local}", host.name, local, rank))
        self._service = MemberService(address, members, deadlines, run_log, self._end_all, self._kill_shell)
        told = {"address": self._service.address, "token": self._service.token, "lost_s": deadlines.lost_s}
        try:
            super().__init__([_with_service(host, told, waiting) for host, waiting in hosts], shared)
        except BaseException:
            self._service.close()
            raise

    def seats(self, began: NodeAssignment) -> NodeAssignment:
        """Where the ranks are now; if that is fewer nodes, where they began. See `launch_system.Ranks.seats`."""
        hosts = tuple(dict.fromkeys(self._service.membership.hosts))
        return dataclasses.replace(began, hosts=hosts) if len(hosts) == len(began.hosts) else began

    def _speak(self) -> None:
        try:
            super()._speak()
        finally:
            self._service.close()

    def _end_all(self) -> None:
        membership = self._service.membership
        self._is_done, self._code = True, self._code or membership.code or 0
        if self._code:
            self._say(membership.over)
        self._wake_up()

    def _kill_shell(self, host: str) -> None:
        for agent in self._agents:
            if agent.host.name == host and not agent.is_over:
                signal_group(agent.process, signal.SIGKILL)

    def _note_end(self, agent: Agent) -> None:
        if agent.port is None and agent.host.spec.count:
            super()._note_end(agent)
            return
        code, name, now = agent.end(), agent.host.name, time.monotonic()
        if self._is_done or self._is_ending:
            return
        if agent.is_again and agent.port is None:
            self._look_later(name, now)
            return
        why = f"{name} is lost: its agent ended with exit code {code}"
        self._lost[name] = _Lost(now + _PAUSE_S, _PAUSE_S)
        self._service.host_lost(name, why)
        if all(one.is_over for one in self._agents):  # no agent is left that could carry out a decision of the service
            self._fail(LOST, why)

    def _look_for_lost_hosts(self, now: float) -> float | None:
        silent = [agent for agent in self._agents if agent.is_again and agent.port is None and not agent.is_over]
        if not self._environment:  # not all hosts with ranks are there yet
            return None
        if self._is_done or self._is_ending or self._code:
            for agent in silent:
                signal_group(agent.process, signal.SIGKILL)
            return None
        for agent in silent:
            if now >= agent.began + ANSWER_S:
                signal_group(agent.process, signal.SIGKILL)
        for number, agent in enumerate(self._agents):
            if agent.is_over and now >= self._lost[agent.host.name].at:
                self._start_again(number, now)
        moments = [self._lost[agent.host.name].at for agent in self._agents if agent.is_over]
        return min([*moments, *(agent.began + ANSWER_S for agent in silent)], default=None)

    def _look_later(self, host: str, now: float) -> None:
        lost = self._lost[host]
        lost.pause_s = min(2 * lost.pause_s, _LONGEST_PAUSE_S)
        lost.at = now + lost.pause_s

    def _start_again(self, number: int, now: float) -> None:
        """Start the agent of a host anew. When it has connected, the service has it start processes."""
        host = self._agents[number].host
        spec = dataclasses.replace(host.spec, first=-1, count=0, spares=0)
        try:
            agent = Agent(dataclasses.replace(host, spec=spec), is_again=True)
        except LaunchFailed:  # no process could be started just now; the ranks that train do not need one
            self._look_later(host.name, now)
            return
        with self._lock:
            agent.unsent += line({"start": self._environment})
            self._agents[number] = agent
        self._print([agent])


def _with_service(host: HostOfRanks, told: dict[str, object], waiting: int) -> HostOfRanks:
    keeps = {**told, "host": host.name}
    return dataclasses.replace(host, spec=dataclasses.replace(host.spec, keeps=keeps, host=host.name, spares=waiting))
