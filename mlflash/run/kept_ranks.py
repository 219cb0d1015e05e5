"""Ranks whose processes stay when others are lost: what `membership` decides about them is done by their agents.

A process sends ``{"ready": true}`` when it waits for a rank, ``{"left": round}`` when it has left a round, ``{"here":
round}`` when it has reached a round and may have to wait there for others, ``{"trains": round, "step", "times"}`` when
it has begun to train, and ``{"done": round}`` when its training has ended. Rank 0 also sends ``{"text": round, "what",
"is"}``, which is for all. It gets ``{"seat": {"round", "rank", "size", "lost_s", "ready_s"}}``, ``{"lost": round,
"ranks", "why"}`` and those texts.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LaunchFailed
from ..launch.ranks import LOST
from ..text import named
from .agents import Agents
from .launch_system import NodeAssignment, NodeLost, RunLog
from .membership import Deadlines, Member, Membership
from .started_ranks import ProcessSpec, Program, StartedRanks, processes_of, program_of

_NEVER = float("inf")


class KeepingAgents:
    """Starts ranks that stay when others are lost, and spares that wait for ranks: `start` is a `Start`.

    Each node without ranks gets as many spare processes as other nodes have ranks.

    Args:
        spares: number of spare processes on the nodes with ranks, if there are no other nodes.
    """

    def __init__(self, agents: Agents, spares: int, deadlines: Deadlines, run_log: RunLog):
        self._agents, self._spares, self._deadlines, self._run_log = agents, spares, deadlines, run_log

    def start(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> KeptRanks:
        others = [host for host in self._agents.hosts() if host not in seats.hosts]
        waiting = dict.fromkeys(others, seats.ranks_per_node)
        if not others:
            waiting = collections.Counter(itertools.islice(itertools.cycle(seats.hosts), self._spares))
        processes = processes_of(seats)
        for host, count in waiting.items():
            first = 0 if host in others else seats.ranks_per_node
            processes += [ProcessSpec(f"{host}#{local}", host, local, None) for local in range(first, first + count)]
        return KeptRanks(self._agents, processes, program_of(argv, env, seats), self._deadlines, self._run_log)


class KeptRanks(StartedRanks):
    """The ranks of one start, see `launch_system.Ranks`. The start goes on as long as lost ranks are replaced."""

    replaces = True

    def __init__(self, agents: Agents, processes: Sequence[ProcessSpec], program: Program, deadlines: Deadlines,
                 run_log: RunLog):  # fmt: skip
        self._run_log = run_log
        members = [Member(process.name, process.host, process.local, process.rank) for process in processes]
        self._home = {process.name: process.host for process in processes}
        self._gone: set[str] = set()  # hosts that are lost
        self._fresh = 0
        self._looks: asyncio.TimerHandle | None = None
        self.membership = Membership(members, self, deadlines, agents.loop.time())
        super().__init__(agents, processes, program)

    @property
    def rounds(self) -> int:
        return self.membership.round

    def seats(self, began: NodeAssignment) -> NodeAssignment:
        """Where the ranks are now; if that is fewer nodes, where they began. See `launch_system.Ranks.seats`."""
        hosts = tuple(dict.fromkeys(self.membership.hosts))
        return dataclasses.replace(began, hosts=hosts) if len(hosts) == len(began.hosts) else began

    # In the loop

    async def _start_all(self) -> None:
        for host in {process.host for process in self._processes} - set(self._hosts):
            if not self._agents.is_there(host):
                self.host_lost(host, "it has no agent yet")
        there = [process for process in self._processes if process.host not in self._gone]
        await asyncio.gather(*(self._start(process, self._program.size) for process in there))

    def _follow(self) -> None:
        """Do what follows from a report that `membership` got."""
        membership, loop = self.membership, self._agents.loop
        if membership.over and not self._is_done:
            self._fail(membership.code or 0, membership.over if membership.code else "")
        if self._looks is not None:
            self._looks.cancel()
        if not membership.over and membership.until < _NEVER:
            self._looks = loop.call_at(membership.until, self._look)

    def _look(self) -> None:
        self.membership.look(self._agents.loop.time())
        self._follow()

    def ended(self, name: str, code: int) -> None:
        if self._living.pop(name, None) is not None:
            self.membership.ended(name, code, how_it_ended(code), self._agents.loop.time())
            self._follow()
            self._look_over()

    def host_lost(self, host: str, why: str) -> None:
        if host not in self._home.values() or host in self._gone:
            return
        self._gone.add(host)
        self._living = {name: home for name, home in self._living.items() if home != host}
        if not self._is_done:
            self.membership.host_lost(host, f"{host} is lost: {why}", self._agents.loop.time())
            self._follow()
        if self._has_begun and not self._living and not self._is_done:  # no process is left that could do anything
            self._fail(LOST, f"{host} is lost: {why}")
        self._look_over()

    def host_back(self, host: str) -> None:
        if host in self._gone and not self._is_done:
            self._gone.remove(host)
            self.note("host_back", host=host)
            self.membership.host_back(host)

    def says(self, name: str, message: dict[str, Any]) -> None:
        if name not in self._living:
            return
        membership, now = self.membership, self._agents.loop.time()
        try:
            match message:
                case {"ready": _}:
                    membership.ready(name, now)
                case {"left": number}:
                    membership.left(name, int(number), now)
                case {"here": number}:
                    membership.here(name, int(number))
                case {"trains": number}:
                    membership.trains(name, int(number), int(message["step"]), dict(message["times"]), now)
                case {"done": number}:
                    membership.done(name, int(number))
                case {"text": number}:
                    membership.text(name, int(number), message["what"], message["is"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            self._agents.printer.say(f"{name} sent a message that cannot be read: {error!r}")
        self._follow()

    # What `Membership` calls

    def tell(self, name: str, message: dict[str, Any]) -> None:
        self._agents.order(self._home[name], "tell", name=name, message=message)

    def kill(self, name: str) -> None:
        self._signal(signal.SIGKILL, name)

    def start(self, host: str, local: int) -> str:
        self._fresh += 1
        process = ProcessSpec(f"{host}#{local}.{self._fresh}", host, local, None)
        self._home[process.name] = host
        self._agents.go(self._start_later(process))
        return process.name

    async def _start_later(self, process: ProcessSpec) -> None:
        self._living[process.name] = process.host
        try:
            await self._start(process, self._program.size)
        except LaunchFailed as error:
            self._living[process.name] = process.host
            self.ended(process.name, error.code if isinstance(error, NodeLost) else LOST)

    def note(self, event: str, **fields: Any) -> None:
        printer = self._agents.printer
        printer.put(lambda: self._run_log.note(event, **fields))
        if event == "host_back":
            printer.say(f"{fields['host']} is back: spares wait there")
        if event == "recovered":
            ranks, why, step, took = (fields[name] for name in ("lost", "why", "step", "seconds"))
            lost = f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} lost ({why})"
            printer.say(f"{lost}; all train on after step {step}, {took:.2f} s later")


def how_it_ended(code: int) -> str:
    """How a process ended, in words, from its exit code as in a shell."""
    return f"its process was killed by signal {code - 128}" if code > 128 else f"its process ended with code {code}"
