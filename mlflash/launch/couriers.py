"""What a trainer starts to have couriers: the agent of its node, and one courier after the other.

Each trainer makes one `Couriers`, for its whole life. The agent of rank 0 is the hub at which the agents of all nodes
meet. The ranks learn its address once (`rendezvous`), and agree on everything else through it. If a rank leaves the
job, it or its agent tells the others. A job of one rank has no hub and no MPI, only a courier.

If an agent is killed, the couriers of its node end, and the next epoch has another one. The next agent of rank 0 is a
hub at the same address with the same token, and the other agents connect again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import DeadlineExceeded, WorldMismatch
from ..placement.topology import this_node
from . import courier_cores
from .agent_client import AgentClient, AgentLost, AgentRefused, Departure, HubLost
from .courier_mpi import readable_namespaces
from .courier_process import ABORTS, NOT_UP, CourierEnd
from .interfaces import own_address
from .launcher_variables import is_on_one_host, launched
from .rendezvous import TOKEN, Meeting, meeting_of, new_token, who_am_i

_REAPED_S = 5.0  # limit for a courier to end, and for its agent to report how
_WITHDRAWN_S = 6.0  # limit for the agent to say who has not come
_PAUSE_S = 0.02
_KNOWN = f"ranks know each other by {TOKEN}, or by a file in a home directory that all nodes share"


class CourierEnded(ConnectionError):
    """A courier has ended while it was needed; the text says how."""


class StartFailed(CourierEnded):
    """The first courier of a trainer has ended by itself before its MPI was up. The next one would do the same."""


class RankDeparted(ConnectionError):
    """A rank has left the job, so there is no next epoch of its couriers."""

    def __init__(self, departure: Departure):
        super().__init__(str(departure))
        self.departure = departure


@dataclasses.dataclass(frozen=True)
class RunningCourier:
    """A courier, as its trainer sees it."""

    number: int  # of its epoch, from 1
    epoch: str  # the name of its world of MPI, the same on all ranks
    nodes: tuple[int, ...]  # of each rank, numbered as they first appear
    channel: socket.socket  # the trainer's end of the connection to it
    pid: int
    cores: frozenset[int]  # that it was told to use; none: those of this process


class Couriers:
    """The couriers of this trainer; one runs at a time, from `next_epoch` on. Close it; it may be closed twice.

    Collective over all ranks of the job. One thread uses it, and no process that was forked from this one. If one rank
    raises, others wait for it until their deadline.

    Args:
        entry_point: ``module:function`` that each courier runs, importable without the trainer's script.
        environment: of this process, with the variables of its launcher.
        timeout_s: for the agent to start, and for the ranks to meet, in seconds.
        job, memory: which agent of this node it is, see `agent_process.names_of`.
        node: sets apart ranks of one host, as if they were on several; "": they are on one node.
        directory: a private directory of this user, where ranks of one host may meet; None: they meet by MASTER_ADDR.
        host: the address of rank 0's host at which the other ranks reach it; None: find it out.
        output: where couriers print to, open until `close`; None: where this process prints to.
        agent: a connection of this process, with that entry point; None: make one.
        own_cores: whether couriers get cores on which no trainer runs.
        meeting: how the ranks meet; None: as `meeting_of` finds possible.

    Attributes:
        met: how the ranks found each other, in words.
        freed: what ranks had seen freed when the newest courier was forked.

    Raises:
        DeadlineExceeded: some ranks, those in ``ranks``, have not come.
        WorldMismatch: the ranks cannot find each other, or contradict each other.
        UnsafePath: a directory or a secret is somebody else's, or open to others.
        AgentLost: the agent could not start; its output says why.
        AgentRefused: it cannot fork, or cannot be the hub.
    """

    def __init__(
        self,
        entry_point: str,
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        job: str = "",
        memory: str = "",
        node: str = "",
        directory: Path | None = None,
        host: str | None = None,
        output: IO[Any] | None = None,
        agent: AgentClient | None = None,
        own_cores: bool = False,
        meeting: Meeting | None = None,
    ):
        self._meeting = meeting or meeting_of(environment, who_am_i(environment), directory, timeout_s)
        self.rank, self.size = self._meeting.me.rank, self._meeting.me.size
        self.met = f"{self.size} ranks met by {self._meeting.how}" if self.size > 1 else "one rank"
        self._node, self._environment = " ".join(this_node(name=node)), environment
        rank_cores = courier_cores.own_rank_cores(environment).to_text() if own_cores else ""
        self._new_agent = functools.partial(AgentClient, entry_point, environment, job=job, memory=memory,
                                            mpi=self.size > 1, rank_cores=rank_cores, output=output)  # fmt: skip
        self.freed: frozenset[str] = frozenset()
        self._number = 0  # the newest epoch
        self._channels = 0  # connections that were made to couriers
        self._running: RunningCourier | None = None
        self._member = secrets.token_hex(8)
        self._token = ""
        self._listens: tuple[str, int] = ("", 0)  # the hub, on rank 0
        self._places: Sequence[tuple[str, int]] = ()  # where the hub is
        self._shared = itertools.count()
        self._has_met = self._has_departed = self._is_given_up = False
        end = time.monotonic() + timeout_s
        self.agent = agent or self._new_agent(timeout_s)
        try:
            if self.size > 1:
                self._meet(host, end)
        except BaseException:
            self.close()
            raise

    @property
    def courier(self) -> RunningCourier:
        if self._running is None:
            raise CourierEnded("there is no courier: no epoch was started, or the last one could not be")
        return self._running

    # Meeting

    def _meet(self, host: str | None, end: float) -> None:
        meeting, ports = self._meeting, self._meeting.ports
        if ports is not None:
            self._token, self._places = ports.token, ports.places
            if self.rank == 0:
                self._with_an_agent(lambda: self._serve(ports.hosts, ports.ports, end), end)
                self._places = [(own_address(self._are_on_one_host(), self._environment), self._listens[1])]
        else:
            assert meeting.share is not None
            text = None
            if self.rank == 0:
                self._token = new_token()
                here = _numeric(host) if host else own_address(self._are_on_one_host(), self._environment)
                self._with_an_agent(lambda: self._serve([here], [0], end), end)
                text = f"{here},{self._listens[1]},{self._token}"
            words = meeting.share(text, left_s(end)).split(",")
            if len(words) != 3 or not words[1].isdecimal():
                raise WorldMismatch("rank 0 sent no address of its agent", found=str(words)[:80])
            self._token, self._places = words[2], [(words[0], int(words[1]))]
        self._with_an_agent(lambda: self._take_seat(end), end)
        self._has_met = True

    def _with_an_agent(self, work: Callable[[], None], end: float) -> None:
        """Do something with the agent, and with the next one if that is killed meanwhile."""
        while True:
            with contextlib.suppress(AgentLost):
                if self.agent.is_lost:
                    self._replace_agent(end)
                work()
                return
            self._check()
            if time.monotonic() > end:
                raise AgentLost("agents of this node have ended again and again")

    def _serve(self, hosts: Sequence[str], ports: Sequence[int], end: float) -> None:
        host, port = self.agent.ask("serve", left_s(end), hosts=[*hosts], ports=[*ports], token=self._token,
                                    size=self.size)  # fmt: skip
        self._listens = str(host), int(port)

    def _take_seat(self, end: float) -> None:
        """Have the agent connect to the hub, where this rank gets its seat."""
        timeout_s = left_s(end)
        try:
            place = self.agent.ask("meet", timeout_s + _WITHDRAWN_S, self._check, rank=self.rank, size=self.size,
                                   member=self._member, places=[[*place] for place in self._places], token=self._token,
                                   within_s=timeout_s)  # fmt: skip
        except HubLost as lost:
            where = "" if self._meeting.ports is None else f", {self._meeting.ports.where} ({_KNOWN})"
            raise DeadlineExceeded(
                f"waited {self._meeting.timeout_s:g} s for the agent of rank 0{where}; last: {lost}", rank=self.rank,
                ranks=[0],
            ) from lost  # fmt: skip
        self._places = [(str(place[0]), int(place[1]))]

    def _are_on_one_host(self) -> bool:
        """Whether the launcher says that all these ranks, which may be some of its own, are on this host."""
        try:
            whole = launched(self._environment)
        except WorldMismatch:  # variables were set for a part of the ranks
            return False
        is_part = whole.size > self.size
        return is_on_one_host(self._environment, whole if is_part else self._meeting.me)

    @property
    def host(self) -> str:
        """The numeric address at which all ranks reach the host of rank 0."""
        return self._places[0][0] if self._places else own_address(True, {})

    # Epochs

    def next_epoch(self, timeout_s: float, freed: Sequence[str] = ()) -> RunningCourier:
        """Have a courier forked, in a world of MPI with those of all other ranks, after the end of the last one.

        Collective. A courier that still runs is killed first, and its socket is closed. The call returns when the
        courier is forked; `wait_up` waits for its MPI. If that is not up ``timeout_s`` after the fork, the courier is
        killed. After DeadlineExceeded the call may be made again. ``freed``: what this rank has seen freed.

        Raises:
            DeadlineExceeded: some ranks, those in ``ranks``, have not called it.
            RankDeparted: a rank has left the job.
            AgentLost, AgentRefused: the agent of this rank cannot start, fork, or be the hub again.
        """
        end = time.monotonic() + timeout_s
        if self._running is not None:
            self._running.channel.close()
            self._running = None
        self._check()
        if self.agent.is_lost:
            self._replace_agent(end)
        facts = [self._node, readable_namespaces(), [*freed]]
        with contextlib.ExitStack() as failed:
            self._channels += 1
            channel = self.agent.channel(self._channels)
            failed.callback(channel.close)
            left, self.agent.hub_lost = left_s(end), None
            try:
                reply = self.agent.ask("next", left, self._check, channel=self._channels, last=self._number,
                                       facts=facts, within_s=left, up_s=timeout_s)  # fmt: skip
            except (DeadlineExceeded, HubLost) as error:
                raise self._late(timeout_s) from error
            if "departed" in reply:
                raise RankDeparted(Departure(**reply["departed"]))
            failed.pop_all()
        self._number, self.freed = reply["number"], frozenset(reply["freed"])
        self._running = RunningCourier(self._number, reply["epoch"], tuple(reply["nodes"]), channel, reply["pid"],
                                       frozenset(reply["cores"]))  # fmt: skip
        return self._running

    def _late(self, timeout_s: float) -> DeadlineExceeded:
        missing: list[int] | None = []
        if self.size > 1:
            try:
                missing = self.agent.ask("withdraw", _WITHDRAWN_S)
            except (AgentRefused, DeadlineExceeded):
                missing = None
        late = f"{len(missing)} of {self.size} have not come" if missing else "all have come, but too late"
        return DeadlineExceeded(
            f"waited {timeout_s:.3g} s for all ranks to start epoch {self._number + 1} of their couriers: "
            + ("the host of rank 0, at which they meet, does not answer" if missing is None else late),
            rank=self.rank,
            ranks=[0] if missing is None else missing,
        )

    def _replace_agent(self, end: float) -> None:
        """Start the agent of this node anew, or find the one that another trainer has started."""
        self.agent.close()
        self.agent = self._new_agent(left_s(end))
        while self._listens[1]:  # on rank 0
            try:
                self._serve(self._listens[:1], self._listens[1:], end)
                break
            except AgentRefused:  # the last one has not quite ended
                if time.monotonic() > end:
                    raise
            time.sleep(_PAUSE_S)
        if self._has_met:
            self._take_seat(end)

    def announce_end(self, timeout_s: float) -> None:
        """Tell all ranks that this epoch is over, because this rank's courier has ended. Not collective; any thread.

        Raises:
            HubLost, AgentLost, DeadlineExceeded: they could not be told.
        """
        self.agent.ask("over", timeout_s, epoch=self.courier.epoch)

    def depart(self, why: str, timeout_s: float, ends_job: bool = True) -> None:
        """Tell all ranks that this one leaves the job permanently. Not collective; any thread.

        ``ends_job``: whether the other ranks must end, too. Raises HubLost, AgentLost or DeadlineExceeded: they could
        not be told.
        """
        self._has_departed = True
        self.agent.ask("depart", timeout_s, why=why, ends_job=ends_job)

    def share(self, text: str | None, timeout_s: float) -> str:
        """Give rank 0's text to all ranks. Collective; one thread may do this in parallel to that of the epochs.

        Raises:
            HubLost, AgentLost, DeadlineExceeded: rank 0 has ended, or did not come.
        """
        if self.size == 1:
            return text or ""
        key = f"shared/{next(self._shared)}"
        shared: str = self.agent.ask("share", timeout_s, key=key, text=text if self.rank == 0 else None)
        return shared

    def wait_for_end(self) -> None:
        """Wait until a rank has announced the end of this epoch, however long that takes.

        Raises RankDeparted, HubLost or AgentLost: nobody can announce anything.
        """
        agent, epoch = self.agent, self.courier.epoch
        agent.wait_for(lambda: epoch in agent.over or bool(agent.departed) or agent.hub_lost is not None)
        if agent.departed:
            raise RankDeparted(agent.departed[0])
        if epoch not in agent.over:
            raise HubLost(agent.hub_lost or "")

    def wait_up(self, timeout_s: float) -> None:
        """Wait until the newest courier has initialized MPI. Not collective, but MPI_Init is.

        Raises:
            DeadlineExceeded: it takes too long.
            CourierEnded: it has ended.
            AgentLost: the agent of this rank has ended.
        """
        epoch, agent = self.courier.epoch, self.agent
        if not agent.wait_for(lambda: epoch in agent.up or epoch in agent.ended, timeout_s):
            raise DeadlineExceeded(f"waited {timeout_s:g} s for courier {self.courier.pid} to initialize MPI",
                                   rank=self.rank, ranks=[])  # fmt: skip
        if epoch not in agent.up:
            raise self.ended(agent.ended[epoch])

    def wait_end(self, timeout_s: float) -> CourierEnd | None:
        """Wait for the end of the newest courier; None: it still runs. Raises AgentLost."""
        epoch, agent = self.courier.epoch, self.agent
        return agent.ended[epoch] if agent.wait_for(lambda: epoch in agent.ended, timeout_s) else None

    def check_start(self) -> None:
        """Check whether a courier that has closed its socket had reached MPI.

        This only checks the first courier of a trainer. Later ones may have ended for other reasons. Raises
        StartFailed: it has ended by itself before MPI was up. AgentLost: nobody knows.
        """
        running = self.courier
        if running.number > 1 or running.epoch in self.agent.up or (end := self.wait_end(_REAPED_S)) is None:
            return
        # The agent kills a courier whose MPI has reported an abort, or has not come up. It has ended by itself.
        by_itself = end.signal is None or (end.why or "").startswith((ABORTS, NOT_UP))
        if running.epoch not in self.agent.up and by_itself:
            raise StartFailed(str(self.ended(end)))

    def ended(self, end: CourierEnd) -> CourierEnded:
        """An error that says how the newest courier has ended."""
        how = f"exited with {end.status}" if end.signal is None else f"was killed by signal {end.signal}"
        why = f", since {end.why}" if end.why else ""
        return CourierEnded(f"courier {self.courier.pid} of rank {self.rank} {how}{why}; its output may say more")

    # The end

    def give_up(self) -> None:
        """End all waits for other ranks, and kill the courier. `close` must follow. Any thread."""
        self._is_given_up = True
        self.agent.tell("kill")
        self.agent.tell("close", tells=False)
        self.agent.close()

    def _check(self) -> None:
        if self._is_given_up:
            raise CourierEnded("these couriers were given up")
        self._meeting.check()

    def close(self, timeout_s: float = 10.0, kill: bool = True) -> None:
        """End the courier, if there is one.

        On rank 0 this ends the hub: no rank can start an epoch any more. If the courier has not ended by itself after
        ``timeout_s``, it is killed. Without ``kill`` the courier is only told that nothing more comes, and in the end
        all ranks hear that this one has left the job.
        """
        if kill:
            self.agent.tell("kill")
        elif self._running is not None:
            with contextlib.suppress(OSError):
                self._running.channel.shutdown(socket.SHUT_WR)
        try:
            self.agent.ask("close", timeout_s, tells=not kill and not self._has_departed)
        except DeadlineExceeded:
            self.agent.tell("kill")
        except (AgentLost, AgentRefused):
            pass
        self.agent.close()
        if self._running is not None:
            self._running.channel.close()
            self._running = None


def _numeric(host: str) -> str:
    """An address of a host: agents look up no names. Raises OSError: it has none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def left_s(end: float) -> float:
    """Seconds left of a deadline, by time.monotonic."""
    return max(0.0, end - time.monotonic())
