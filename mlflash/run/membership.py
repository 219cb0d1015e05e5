"""Decides which process has which rank in a training that survives lost processes, and when rounds begin. Pure.

During a round each rank belongs to the same process. When a process with a rank ends or its host is lost, the round is
over. All other processes are told, leave their step and report that. Waiting processes (spares) get the lost ranks, and
all begin the next round. In doubtful cases all processes end, and the job is started again. These are: nobody can
replace a lost rank, some rank had already finished, or rounds fail again at the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

_SAME_STEP = 2  # rounds that may begin at one step; a third would probably fail, too
_IN_VAIN = 3  # processes that may end before they are ready, and rounds that may fail before all ranks have begun
NEVER = float("inf")


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long each phase may take, in seconds."""

    # a host without a sign of life for this long is lost; a process that notices a lost rank first waits as long
    lost_s: float = 10.0
    leave_s: float = 30.0  # to leave a step
    ready_s: float = 120.0  # then to the next step: for couriers, process groups, and a spare that must become ready


class Acts(Protocol):
    """What `Membership` needs done by the owner of the processes."""

    def tell(self, name: str, message: dict[str, Any]) -> None:
        """Send a message to a process."""

    def kill(self, name: str) -> None:
        """Kill a process. `Membership.ended` must be called when it has ended."""

    def start(self, host: str, local: int) -> str:
        """Start a spare process in the place of one that has ended there; return its name."""

    def note(self, event: str, **fields: Any) -> None:
        """Write down an event."""


@dataclasses.dataclass
class Member:
    """A process."""

    name: str
    host: str  # host, local: the host, and the number of the process on it
    local: int
    rank: int | None = None  # that it has, or had when it ended; None while it waits for one
    is_ready: bool = False  # whether it has reported that it waits
    left: int = 0  # the last round that it has reported to have left; 0 before the first round
    is_here: bool = False  # whether it has reached this round with the rank that it has in it
    is_in: bool = False
    is_done: bool = False  # whether its training has finished and the process has not ended yet
    code: int | None = None


class Membership:
    """The processes of one start of a job."""

    def __init__(self, members: Sequence[Member], acts: Acts, deadlines: Deadlines, now: float):
        self.members = {member.name: member for member in members}
        self._acts, self._deadlines = acts, deadlines
        self.size = sum(member.rank is not None for member in members)
        self.round, self.over = 1, ""  # over: why there is no next round; "" while there may be one
        self.hosts = tuple(member.host for member in self._seated())
        self.code: int | None = None  # exit code, if it is over or all have finished
        self._phase, self.until = "starting", NEVER  # a loss before all have begun ends the start
        self._why, self._lost, self._since = "", list[int](), now
        self._step: int | None = None  # the step at which the last round began
        self._same_step = self._code = 0
        self._times: dict[str, float] = {}  # the longest of all ranks, by name
        self._texts: dict[str, str] = {}  # from rank 0 to the others, in this round
        self._failed = 0  # consecutive rounds that not all ranks have begun
        self._in_vain = 0  # consecutive processes that have ended before they were ready
        self._places: list[tuple[str, int]] = []  # where to start other processes, as soon as nobody has to wait for it

    # Reports

    def ready(self, name: str, now: float) -> None:
        """Note that a process waits for its rank. If it has one, tell it.

        Either it was started with this rank, or it has begun its program anew and has lost what it was told.
        """
        member = self.members[name]
        member.is_ready, self._in_vain = True, 0
        if member.rank is not None and self._phase == "leaving":  # it has begun its program anew meanwhile
            member.left = self.round
        if member.rank is not None and self._phase in ("starting", "seating"):
            self._give(member)
            for what, text in self._texts.items():
                self._tell_text(member, what, text)
        self._look(now)

    def left(self, name: str, number: int, now: float) -> None:
        member = self.members[name]
        member.left, member.is_ready = number, True
        self._look(now)

    def here(self, name: str, number: int) -> None:
        """Note that a process has reached a round and waits for others."""
        self.members[name].is_here = number == self.round

    def trains(self, name: str, number: int, step: int, times: dict[str, float], now: float) -> None:
        """Note that a process trains in a round from a step on, and how long each part took, in seconds."""
        member = self.members[name]
        if number != self.round or self._phase not in ("starting", "seating"):
            return
        member.is_in, member.is_ready = True, False
        self._times |= {what: max(self._times.get(what, 0.0), took) for what, took in times.items()}
        if not all(other.is_in for other in self._seated()):
            return
        if self._phase == "seating":
            self._acts.note("recovered", round=self.round, lost=self._lost, why=self._why, step=step,
                            seconds=round(now - self._since, 3), times=self._times)  # fmt: skip
            self._failed = 0
        self._same_step = self._same_step + 1 if step == self._step else 1
        if self._same_step > _SAME_STEP:
            self._end(f"{self._named()} was lost, and {_SAME_STEP} rounds had already begun at step {step}")
            return
        self._step, self._phase, self.until = step, "training", NEVER
        self._lost = []
        self._fill_places()

    def done(self, name: str, number: int) -> None:
        """Note that the training of a process has finished in a round. It cannot go back any more."""
        self.members[name].is_done = number == self.round and self._phase == "training"

    def text(self, name: str, number: int, what: str, text: str) -> None:
        if number == self.round and self.members[name].rank == 0:
            self._texts[what] = text
            for member in self._staying():
                self._tell_text(member, what, text)

    def ended(self, name: str, code: int, why: str, now: float) -> None:
        """Note that a process has ended. If it failed, start another one in its place as soon as all ranks train."""
        member = self.members[name]
        if member.code is not None or self.over:
            return
        member.code = code
        self._in_vain += member.rank is None and not member.is_ready
        if member.rank is not None and (code or not member.is_in):
            self._lose([member], why, now)
        elif all(other.code == 0 for other in self._seated()):
            self.over, self.code = "all ranks came to their end", 0
        if code and not self.over and self._in_vain < _IN_VAIN:
            self._places.append((member.host, member.local))
        self._look(now)
        self._fill_places()

    def host_lost(self, host: str, why: str, now: float) -> None:
        lost = [member for member in self._living() if member.host == host and not self.over]
        self._places = [place for place in self._places if place[0] != host]
        for member in lost:
            member.code = 255
        if ranks := [member for member in lost if member.rank is not None]:
            self._lose(ranks, why, now)
        self._look(now)
        self._fill_places()

    def host_back(self, host: str) -> None:
        """Note that a host has an agent again. If it was lost, start as many processes there as it had."""
        there = [member for member in self.members.values() if member.host == host]
        if self.over or not there or any(member.code is None for member in there):
            return
        self._acts.note("host_back", host=host)
        for local in sorted({member.local for member in there}):
            self._start(host, local)

    def look(self, now: float) -> None:
        if self.over or now < self.until:
            return
        if self._phase == "waiting":
            self._end(f"no process was ready in time to take the place of {self._named()}")
            return
        self.until = now + self._deadlines.ready_s  # for the killed processes to end
        if self._phase == "leaving":
            late = [member for member in self._staying() if member.left < self.round]
        else:  # processes that are here wait for those that are not
            late = [member for member in self._staying() if not member.is_here and not member.is_in]
            late = late or [member for member in self._staying() if not member.is_in]
        for member in late:
            self._acts.note("late", round=self.round, rank=member.rank, phase=self._phase)
            self._acts.kill(member.name)

    # Decisions

    def _fill_places(self) -> None:
        """Start missing processes, unless others are recovering and do not need them: imports take all cores."""
        empty = [member for member in self._seated() if member.code is not None]
        spares = [member for member in self._living() if member.rank is None]
        if self.over or (self._phase != "training" and len(spares) >= len(empty)):
            return
        places, self._places = self._places, []
        for host, local in places:
            self._start(host, local)

    def _start(self, host: str, local: int) -> None:
        fresh = self._acts.start(host, local)
        self.members[fresh] = Member(fresh, host, local)

    def _seated(self) -> list[Member]:
        """The processes that have a rank, in order of rank. A lost one keeps it until another process gets it."""
        seated = [member for member in self.members.values() if member.rank is not None]
        return sorted(seated, key=lambda member: member.rank or 0)

    def _living(self) -> list[Member]:
        return [member for member in self.members.values() if member.code is None]

    def _staying(self) -> list[Member]:
        return [member for member in self._seated() if member.code is None]

    def _named(self) -> str:
        ranks = ", ".join(map(str, self._lost))
        return f"{'ranks' if len(self._lost) > 1 else 'rank'} {ranks} ({self._why})"

    def _lose(self, members: Sequence[Member], why: str, now: float) -> None:
        if not self._lost:
            self._why, self._since, self._code = why, now, members[0].code or 0
        self._lost = sorted({*self._lost, *(member.rank for member in members if member.rank is not None)})
        if all(member.code for member in self._seated()):
            self._end(f"all ranks were lost, the last one {self._named()}")
        elif self._phase == "starting":
            self._end(f"{self._named()} was lost before all ranks had begun")
        elif any(member.code == 0 or (member.is_done and member.code is None) for member in self._seated()):
            self._end(f"{self._named()} was lost after other ranks had finished")
        elif self._failed >= _IN_VAIN:
            self._end(f"{self._named()} was lost, and {_IN_VAIN} rounds had failed before all ranks had begun")
        elif self._phase in ("training", "seating"):
            self._failed += self._phase == "seating"
            self._phase, self.until = "leaving", now + self._deadlines.leave_s
            for member in self._staying():
                member.is_in = False
                self._acts.tell(member.name, {"lost": self.round, "ranks": self._lost, "why": why})

    def _look(self, now: float) -> None:
        if self.over or self._phase not in ("leaving", "waiting"):
            return
        if any(member.left < self.round for member in self._staying()):
            return
        empty = [member for member in self._seated() if member.code is not None]
        waiting = [member for member in self._living() if member.rank is None and member.is_ready]
        if len(waiting) < len(empty):
            if self._phase == "leaving":
                self._phase, self.until = "waiting", now + self._deadlines.ready_s
            return
        hosts = {member.host for member in waiting}
        for lost in sorted(empty, key=lambda member: member.host not in hosts):  # which may have the slots of the rank
            best = min(waiting, key=lambda member: member.host != lost.host)
            waiting.remove(best)
            best.rank, lost.rank = lost.rank, None
        self.round += 1
        self._phase, self.until = "seating", now + self._deadlines.ready_s
        self._times, self._texts = {}, {}
        self.hosts = tuple(member.host for member in self._seated())
        for member in self._seated():
            member.is_here = member.is_in = False
            self._give(member)

    def _give(self, member: Member) -> None:
        seat = {"round": self.round, "rank": member.rank, "size": self.size, "lost_s": self._deadlines.lost_s,
                "ready_s": self._deadlines.ready_s}  # fmt: skip
        self._acts.tell(member.name, {"seat": seat})

    def _tell_text(self, member: Member, what: str, text: str) -> None:
        self._acts.tell(member.name, {"text": self.round, "what": what, "is": text})

    def _end(self, why: str) -> None:
        self.over, self.code = why, self._code or 1
