"""The ranks of one start, which agents have started: how they begin together and end together, or replace each other.

A process that stays when others are lost sends ``{"ready": true}`` when it waits for a rank, ``{"left": round,
"unit"}`` when it has left a round (``unit``: of what the number of ranks must be a multiple), ``{"here": round}`` when
it has reached a round and may have to wait there for others, ``{"trains": round, "step", "times", "unit"}`` when it has
begun to train, ``{"stuck": round, ...}`` to say where it is, and ``{"done": round}`` when its training has ended. Rank
0 also sends ``{"text": round, "what", "is"}``, which is for all. It gets ``{"seat": {"round", "rank", "size", "lost_s",
"ready_s", "hang_s"}}``, ``{"lost": round, "ranks", "why"}``, ``{"where": round}`` and those texts.

Before a planned end of a round it gets ``{"pause": round}``, and sends ``{"saved": round, "step"}``. Then it gets
``{"pause_after": round, "step"}``, and sends ``{"paused": round}`` when a save after this step is committed. With
``{"go_on": round}`` nothing comes of the plan.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchFailed
from ..events import Event
from ..launch.cause import Cause
from ..launch.launcher_variables import without_rank
from ..launch.rank_processes import LOST
from ..launch.rendezvous import TOKEN
from ..text import named
from .agents import Agents, NodeLost
from .membership import NEVER, Deadlines, Member, Membership, Stuck
from .processes import KILL_WAIT_S

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


class RunLog:
    """Adds lines to a file; None: nowhere. A file that cannot be written does not stop a run."""

    def __init__(self, path: Path | None):
        self._path = path

    def note(self, event: str, **fields: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError:
            self._path = None


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that ranks on other hosts get, as from mpiexec: all but those of this host."""
    return {name: value for name, value in without_rank(environment).items()
            if name not in _STAYS and not name.startswith(_STAY)}  # fmt: skip


def start(
    agents: Agents, hosts: Sequence[str], ranks_per_node: int, argv: Sequence[str], env: Mapping[str, str]
) -> StartedRanks:
    """Start a program on all ranks. ``env`` is added to the environment of this process."""
    return StartedRanks(agents, _ranks_on(hosts, ranks_per_node), argv, env)


@dataclasses.dataclass(frozen=True)
class KeepAlive:
    """How ranks stay that outlive others.

    Attributes:
        spares: processes that wait on the nodes with ranks, if there are no other nodes.
        least, most: the smallest and the largest number of ranks; 0: as many as are started.
    """

    spares: int
    deadlines: Deadlines
    least: int = 0
    most: int = 0


def start_kept(agents: Agents, options: KeepAlive, run_log: RunLog, hosts: Sequence[str], ranks_per_node: int,
               argv: Sequence[str], env: Mapping[str, str]) -> KeptRanks:  # fmt: skip
    """Start ranks that stay when others are lost, and spares that wait for ranks.

    Each node without ranks gets as many spare processes as other nodes have ranks.
    """
    others = [host for host in agents.hosts if host not in hosts]
    places = [(host, local) for host in others for local in range(ranks_per_node)]
    if not others:
        places = [(hosts[number % len(hosts)], ranks_per_node + number // len(hosts))
                  for number in range(options.spares)]  # fmt: skip
    waiting = [Member(f"{host}#{local}", host, local) for host, local in places]
    return KeptRanks(agents, _ranks_on(hosts, ranks_per_node) + waiting, argv, env, options, run_log)


def _ranks_on(hosts: Sequence[str], ranks_per_node: int) -> list[Member]:
    places = itertools.product(hosts, range(ranks_per_node))
    return [Member(f"{host}#{local}", host, local, rank) for rank, (host, local) in enumerate(places)]


Start = Callable[[Sequence[str], int, Sequence[str], Mapping[str, str]], "StartedRanks"]
"""`start` or `start_kept`, without the arguments that are the same for all starts of a job."""


class StartedRanks:
    """The ranks of one start. If one fails, or a node is lost, all others are ended.

    Ranks find each other as under torchrun, by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR (the host of
    rank 0) and MASTER_PORT (a free port, another one for each start).

    Attributes:
        replaces: whether this object itself detects lost ranks and nodes and replaces them, so that the start goes on.
        lost: nodes that were lost and not replaced, and why.
        is_repeated: whether an error ended it that came back after the same step.

    Args:
        most: the largest number of ranks that it may have, for processes that stay when others are lost.
    """

    replaces = is_repeated = False

    def __init__(self, agents: Agents, members: Sequence[Member], argv: Sequence[str], env: Mapping[str, str],
                 most: int = 0):  # fmt: skip
        try:
            directory = os.getcwd()
        except OSError as error:
            raise LaunchFailed(f"ranks have no directory to start in: {error.strerror}") from error
        self._agents, self._members = agents, list(members)
        self._began_on = tuple(dict.fromkeys(member.host for member in members if member.rank is not None))
        self._size = sum(member.rank is not None for member in members)
        self._program = {
            "argv": list(argv),
            "directory": directory,
            "kept": max(most, self._size) if self.replaces else 0,
        }
        self._environment = {**travelling(os.environ), TOKEN: secrets.token_hex(16), **env,
                             "LOCAL_WORLD_SIZE": str(self._size // len(self._began_on))}  # fmt: skip
        self._living: dict[str, Member] = {}  # by name
        self._code = 0  # the first one that is not 0
        self.lost: dict[str, str] = {}
        self._causes: list[Cause] = []  # of the ranks and nodes that failed, in this order
        self._is_ending = self._has_begun = self._is_done = False
        self._over = Event()
        agents.loop.call_soon_threadsafe(self._enter)

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._began_on

    @property
    def rounds(self) -> int:
        """How often all ranks have begun, or were about to: more than once if any was replaced."""
        return 1

    @property
    def cause(self) -> Cause | None:
        """Why it failed: the first cause that does not follow from another one; None if nothing has failed."""
        return next((cause for cause in self._causes if not cause.follows), self._causes[0] if self._causes else None)

    def poll(self) -> int | None:
        """Exit code as in a shell, the first that is not 0. None while ranks run or are being ended."""
        return self._code if self._over.is_set() else None

    def signal(self, number: int) -> None:
        self._agents.loop.call_soon_threadsafe(self._signal, number)

    def ask_move(self, host: str) -> str:
        """Call `move` from another thread than that of the loop."""

        async def move() -> str:
            return self.move(host)

        return self._agents.call(move())

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        """End all ranks that can be reached; SIGKILL comes ``wait_s`` after SIGTERM."""
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
        try:
            await asyncio.gather(*map(self._agents.connected, self._began_on))
            used, main = self._agents.used, self._began_on[0]
            port = await self._agents.question(main, "port", used=used)
            used.append(port)
            self._meets = {"MASTER_ADDR": self._agents.system.address_of(main), "MASTER_PORT": str(port)}
            await self._start_all()
        except NodeLost as error:
            self._fail(error.code, f"no rank on {error.host}: {error.message}")
        except Exception as error:
            self._fail(1, f"the ranks could not be started: {error!r}")
        finally:
            self._has_begun = True
            self._look_over()

    async def _start_all(self) -> None:
        self._living |= {member.name: member for member in self._members if member.code is None}
        self._has_begun = True  # if some starts are refused, the others are not cancelled, but answered and then ended
        await asyncio.gather(*map(self._start, self._living.values()))

    async def _start(self, member: Member) -> None:
        """Start a process on its node. If that fails, it has ended."""
        environment = {**self._environment, "LOCAL_RANK": str(member.local)}
        if member.rank is not None:  # otherwise it must not join those that have one
            environment |= {"RANK": str(member.rank), "WORLD_SIZE": str(self._size), **self._meets}
        try:
            await self._agents.question(
                member.host, "start", name=member.name, environment=environment, **self._program
            )
        except NodeLost as error:
            if member.name in self._living and not self._is_done:
                self._agents.printer.say(f"no rank on {member.host}: {error.message}")
            self.ended(member.name, error.code, Cause("exit", f"its process was not started: {error.message}"))

    def _signal(self, number: int) -> None:
        by_host = collections.defaultdict[str, list[str]](list)
        for member in self._living.values():
            by_host[member.host].append(member.name)
        for host, names in by_host.items():
            self._agents.order(host, "signal", number=number, names=names)

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
        if left := {member.host for member in self._living.values()}:
            if not self._is_ending:
                self._agents.printer.say(f"the ranks on {', '.join(left)} have not ended {_OTHERS_S:g} s later")
            for host in left:
                self._agents.lose(host, "its ranks do not end")
                self._forget(host)  # it may have had no agent
            self._look_over()

    def _look_over(self) -> None:
        if self._has_begun and not self._living and self in self._agents.starts:
            self._agents.starts.remove(self)
            self._agents.printer.put(self._over.set)  # when all is printed
            self._agents.loop.call_later(_FLUSH_S, self._over.set)

    def ended(self, name: str, code: int, cause: Cause) -> None:
        """Note the end of a process. ``cause``: why it failed, if ``code`` is not 0."""
        member = self._living.pop(name, None)
        if member is not None and code:
            self._note_cause(_at(member, cause))
            self._fail(code)
        self._look_over()

    def _note_cause(self, cause: Cause) -> None:
        if not self._is_done or cause.kind not in ("killed", "exit"):  # as all end that are told to
            self._causes.append(cause)

    def host_lost(self, host: str, why: str) -> None:
        if self._forget(host):
            self.lost[host] = why
            self._causes.append(Cause("node", f"{host} is lost: {why}", host=host))
            self._fail(LOST, f"{host} is lost: {why}")
        self._look_over()

    def _forget(self, host: str) -> bool:
        """Forget what ran on a node; return whether anything did."""
        before = len(self._living)
        self._living = {name: member for name, member in self._living.items() if member.host != host}
        return len(self._living) < before

    def host_back(self, host: str) -> None:
        """Note that a node has an agent again."""

    def move(self, host: str) -> str:
        """Let all ranks leave a node at the next save. Return why not; "": they will."""
        return "its ranks are not kept: `mlflash run` was called without --keep-alive"

    def says(self, name: str, message: dict[str, Any]) -> None:
        """Take what a process says that is kept."""


class KeptRanks(StartedRanks):
    """The ranks of one start, whose processes stay when others are lost. `membership` decides about them.

    The start goes on as long as lost ranks are replaced.
    """

    replaces = True

    def __init__(self, agents: Agents, members: Sequence[Member], argv: Sequence[str], env: Mapping[str, str],
                 options: KeepAlive, run_log: RunLog):  # fmt: skip
        self._run_log, self._fresh = run_log, itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self.membership = Membership(members, self, options.deadlines, agents.loop.time(), options.least, options.most)
        super().__init__(agents, members, argv, env, options.most)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes on which the ranks are now; if these are fewer than at first, the nodes on which they began."""
        hosts = tuple(dict.fromkeys(self.membership.hosts))
        return hosts if len(hosts) >= len(self._began_on) else self._began_on

    @property
    def rounds(self) -> int:
        return self.membership.round

    @property
    def cause(self) -> Cause | None:
        last = self.membership.cause if self.membership.code else None
        return super().cause or last if last is not None and last.follows else last

    @property
    def is_repeated(self) -> bool:  # type: ignore[override]
        return self.membership.is_repeated

    # In the loop

    async def _start_all(self) -> None:
        for host in {member.host for member in self._members} - set(self._began_on):
            if not self._agents.is_there(host):
                self.host_lost(host, "it has no agent yet")
        await super()._start_all()

    def _follow(self) -> None:
        """Do what follows from a report that `membership` got."""
        membership = self.membership
        if self._timer is not None:
            self._timer.cancel()
        if membership.over:
            self._fail(membership.code or 0, membership.over if membership.code else "")
        elif membership.until < NEVER:
            self._timer = self._agents.loop.call_at(membership.until, self._look)

    def _look(self) -> None:
        if not self._is_done:
            self.membership.look(self._agents.loop.time())
            self._follow()

    def ended(self, name: str, code: int, cause: Cause) -> None:
        member = self._living.pop(name, None)
        if member is not None and self._is_done:
            self._note_cause(_at(member, cause))
        elif member is not None:
            self.membership.ended(name, code, _at(member, cause), self._agents.loop.time())
            self._follow()
        self._look_over()

    def host_lost(self, host: str, why: str) -> None:
        self._forget(host)
        if not self._is_done:
            self.membership.host_lost(host, f"{host} is lost: {why}", self._agents.loop.time())
            self._follow()
        self._look_over()

    def host_back(self, host: str) -> None:
        if not self._is_done:
            self.membership.host_back(host, self._agents.loop.time())

    def says(self, name: str, message: dict[str, Any]) -> None:
        if self._is_done or name not in self._living:
            return
        membership, now = self.membership, self._agents.loop.time()
        try:
            match message:
                case {"ready": _}:
                    membership.ready(name, now)
                case {"left": number}:
                    membership.left(name, int(number), now, int(message["unit"]))
                case {"saved": number}:
                    membership.saved(name, int(number), int(message["step"]))
                case {"paused": number}:
                    membership.paused(name, int(number), now)
                case {"here": number}:
                    membership.here(name, int(number))
                case {"trains": number}:
                    membership.trains(name, int(number), int(message["step"]), dict(message["times"]), now,
                                      int(message["unit"]))  # fmt: skip
                case {"stuck": number}:
                    at = Stuck(int(message["count"]), float(message["idle"]), float(message["limit"]),
                               bool(message["waits"]), message["after"], message["where"])  # fmt: skip
                    membership.stuck(name, int(number), at, now)
                case {"done": number}:
                    membership.done(name, int(number))
                case {"text": number}:
                    membership.text(name, int(number), message["what"], message["is"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            self._agents.printer.say(f"{name} sent a message that cannot be read: {error!r}")
        self._follow()

    def move(self, host: str) -> str:
        """See `StartedRanks.move`."""
        if self._is_done:
            return "the ranks are being ended"
        why_not = self.membership.move(host, self._agents.loop.time())
        self._follow()
        return why_not

    # What `Membership` calls

    def tell(self, name: str, message: dict[str, Any]) -> None:
        self._agents.order(self.membership.members[name].host, "tell", name=name, message=message)

    def kill(self, name: str) -> None:
        self._agents.order(self.membership.members[name].host, "signal", number=signal.SIGKILL, names=[name])

    def lose(self, host: str, why: str) -> None:
        self._agents.loop.call_soon(self._agents.lose, host, why)

    def start(self, host: str, local: int) -> str:
        member = Member(f"{host}#{local}.{next(self._fresh)}", host, local)
        self._living[member.name] = member
        self._agents.go(self._start(member))
        return member.name

    def note(self, event: str, **fields: Any) -> None:
        printer = self._agents.printer
        printer.put(lambda: self._run_log.note(event, **fields))
        if event == "host_back":
            printer.say(f"{fields['host']} is back: spares wait there")
        if event == "hang":
            waits = f", and the others wait after {' and '.join(fields['others'])}" if fields["others"] else ""
            printer.say(f"rank {fields['rank']} made no progress for {fields['seconds']:g} s: {fields['why']}{waits}; "
                        "it is killed")  # fmt: skip
        if event in ("recovered", "moved"):
            ranks, why, step, took = (fields[name] for name in ("lost", "why", "step", "seconds"))
            if ranks:
                why = f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} lost ({why})"
            count = "all" if fields["ranks"] == self._size else f"{fields['ranks']} of {self._size} ranks"
            printer.say(f"{why}; {count} train on after step {step}, {took:.2f} s later")


def _at(member: Member, cause: Cause) -> Cause:
    return dataclasses.replace(cause, rank=member.rank, host=member.host)
