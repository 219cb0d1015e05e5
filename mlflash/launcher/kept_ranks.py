"""Ranks whose processes stay when others are lost (see `membership`). A remote shell or srun starts them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import LaunchFailed
from ..wireup.own_address import own_address
from ..wireup.own_process import running
from .host_agent import LOST
from .member_service import MemberService
from .membership import Deadlines, Member
from .node_assignment import NodeAssignment
from .on_slurm import STEPS, OnSlurm, beside
from .on_ssh import AGENT, OnSsh
from .processes import signal_group
from .ranks_by_ssh import ANSWER_S, Agent, HostOfRanks, RanksBySsh, line
from .run_log import RunLog

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two checks whether a lost host is back


class OnKeptHosts(OnSsh):
    """Starts ranks by a remote shell. Ranks that `train` starts stay when others are lost, and spares wait for ranks.

    Args:
        hosts: the nodes. Each node without ranks gets as many spare processes as other nodes have ranks.
        shell: see `OnSsh`.
        spares: number of spare processes on the nodes with ranks, if there are no other nodes.
        deadlines: how long each phase may take.
        run_log: receives events.
    """

    def __init__(self, hosts: Sequence[str], shell: str, spares: int, deadlines: Deadlines, run_log: RunLog):
        super().__init__(hosts, shell)
        self._spares, self._deadlines, self._run_log = spares, deadlines, run_log

    def train(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> KeptRanks:
        """Start a program on all ranks and all spares; see `launch_system.Launcher.start`."""
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

    Args:
        slurm: the allocation.
        spares, deadlines, run_log: see `OnKeptHosts`.
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

    Args:
        hosts: each host with the number of its spare processes.
        shared: see `RanksBySsh`.
        address: of this host, as all others reach it.
        deadlines: how long each phase may take.
        run_log: receives events.
    """

    replaces = True

    @property
    def rounds(self) -> int:
        """The number of the current round."""
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
        """Start the agent of a host anew. When it has connected, `member_service` has it start processes."""
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
