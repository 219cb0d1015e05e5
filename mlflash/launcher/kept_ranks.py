"""Ranks whose processes stay when others are lost, see `membership`; a remote shell starts them, or srun."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import LaunchFailed
from ..wireup.own_address import own_address
from .host_agent import LOST
from .member_service import MemberService
from .membership import Deadlines, Member
from .node_assignment import NodeAssignment
from .on_slurm import STEPS, OnSlurm, beside
from .on_ssh import AGENT, OnSsh
from .processes import signal_group
from .ranks_by_ssh import ANSWER_S, Agent, HostOfRanks, RanksBySsh, line
from .run_log import RunLog

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two looks whether a lost host is there again


class OnKeptHosts(OnSsh):
    """Starts ranks by a remote shell; those of `train` stay when others are lost, and processes wait for their ranks.

    Args:
        hosts: the nodes; those without ranks have as many processes that wait.
        shell: see `OnSsh`.
        spares: processes that wait on the nodes with ranks, where there are no others.
        deadlines: how long all may take.
        run_log: is told what happens.
    """

    def __init__(self, hosts: Sequence[str], shell: str, spares: int, deadlines: Deadlines, run_log: RunLog):
        super().__init__(hosts, shell)
        self._spares, self._deadlines, self._run_log = spares, deadlines, run_log

    def train(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> KeptRanks:
        """Start a program on all ranks, and on those that wait; see `launch_system.Launcher.start`."""
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
    """Starts ranks that stay, and processes that wait, by a step of Slurm on each node: no step has two nodes.

    A node that dies ends its own step only, and where one comes back the others know nothing of it.

    Args:
        slurm: the allocation.
        spares, deadlines, run_log: see `OnKeptHosts`.
    """

    def __init__(self, slurm: OnSlurm, spares: int, deadlines: Deadlines, run_log: RunLog):
        super().__init__(slurm.hosts(), "srun", spares, deadlines, run_log)
        self._extra_words = [f"--job-name={STEPS}kept", *slurm.extra]
        self._local = set()

    def _command(self, host: str) -> list[str]:
        return beside([host], self._extra_words, [sys.executable, "-m", AGENT])


@dataclasses.dataclass
class _Lost:
    """A host that is lost: when to look whether it is there again, and how long to wait after that."""

    at: float
    pause_s: float


class KeptRanks(RanksBySsh):
    """The ranks of one start, see `launch_system.Ranks`; it goes on as long as lost ones are replaced.

    A host that is lost is looked for from time to time, and processes wait there when it is back.

    Args:
        hosts: each with how many processes wait there.
        shared: see `RanksBySsh`.
        address: of this host, where all others reach it.
        deadlines: how long all may take.
        run_log: is told what happens.
    """

    replaces = True

    @property
    def rounds(self) -> int:
        """Which round it is."""
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
        """Where its ranks are now; where they began if that is fewer nodes now, see `launch_system.Ranks.seats`."""
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
        why = f"{name} is lost: its agent ended with {code}"
        self._lost[name] = _Lost(now + _PAUSE_S, _PAUSE_S)
        self._service.host_lost(name, why)
        if all(one.is_over for one in self._agents):  # nobody waits for what the service makes of it
            self._fail(LOST, why)

    def _look_for_lost_hosts(self, now: float) -> float | None:
        silent = [agent for agent in self._agents if agent.is_again and agent.port is None and not agent.is_over]
        if not self._environment:  # not all that have ranks are there
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
        """Start the agent of a host anew; `member_service` has it start processes when it has come."""
        host = self._agents[number].host
        spec = dataclasses.replace(host.spec, first=-1, count=0, spares=0)
        try:
            agent = Agent(dataclasses.replace(host, spec=spec), is_again=True)
        except LaunchFailed:  # no process could be had here just now; those that train need none
            self._look_later(host.name, now)
            return
        with self._lock:
            agent.unsent += line({"start": self._environment})
            self._agents[number] = agent
        self._print([agent])


def _with_service(host: HostOfRanks, told: dict[str, object], waiting: int) -> HostOfRanks:
    keeps = {**told, "host": host.name}
    return dataclasses.replace(host, spec=dataclasses.replace(host.spec, keeps=keeps, host=host.name, spares=waiting))
