"""Who has which rank of a training that goes on where processes are lost, and when the next round begins. Pure.

A round is the time in which each rank is the same process. When one that has a rank ends, or its host is lost, the
round is over: all others are told, leave their step, and say so; processes that wait (spares) get the ranks of those
that are lost, and all begin the next round. Whatever is in doubt ends it all, and the job is started again: a rank that
is lost with nobody to replace it, one that had come to its end already, or rounds that fail at the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

_SAME_STEP = 2  # rounds that began at one step, after which there is no hope
_IN_VAIN = 3  # processes that end before they are ready, after which no more are started; rounds that so fail
_NEVER = float("inf")


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long processes may take, seconds.

    Attributes:
        lost_s: without a sign of life from a host, after which it is lost; what a process waits that hears of a lost
            rank before anybody else.
        leave_s: to leave a step.
        ready_s: from there to the next step: for couriers and process groups, and for a spare to be ready.
    """

    lost_s: float = 10.0
    leave_s: float = 30.0
    ready_s: float = 120.0


class Acts(Protocol):
    """What follows from it all, done by who has the processes."""

    def tell(self, name: str, message: dict[str, Any]) -> None:
        """Send a message to a process."""

    def kill(self, name: str) -> None:
        """Kill a process; `Membership.ended` is to be called when it has ended."""

    def start(self, host: str, local: int) -> str:
        """Start a process that waits for a rank, in the place of one that has ended there; gives its name."""

    def note(self, event: str, **fields: Any) -> None:
        """Write down what happened."""


@dataclasses.dataclass
class Member:
    """A process.

    Attributes:
        name: of its own.
        host, local: where it is: the host, and its number there.
        rank: that it has, or had when it ended; None: it waits for one.
        is_ready: whether it has said that it waits.
        left: the round that it has said to have left last; that before the first is 0.
        is_here: whether it has come to this round, with the rank that it has there.
        is_in: whether it trains in this round.
        is_done: whether it has come to the end of training, and has not ended yet.
        code: how it ended, as a shell says it; None: it has not.
    """

    name: str
    host: str
    local: int
    rank: int | None = None
    is_ready: bool = False
    left: int = 0
    is_here: bool = False
    is_in: bool = False
    is_done: bool = False
    code: int | None = None


class Membership:
    """The processes of one start of a job.

    Args:
        members: those that are started with ranks, in the order of these, and those that wait.
        acts: does what follows.
        deadlines: how long all may take.
        now: seconds, by a clock that goes on evenly.

    Attributes:
        round: which it is, from 1 on.
        over: why there is no next round; "": there may be one.
        code: exit code, where it is over, or all have come to their end.
        hosts: where each rank is in this round.
    """

    def __init__(self, members: Sequence[Member], acts: Acts, deadlines: Deadlines, now: float):
        self._members = {member.name: member for member in members}
        self._acts, self._deadlines = acts, deadlines
        self.size = sum(member.rank is not None for member in members)
        self.round, self.over = 1, ""
        self.hosts = tuple(one.host for one in self._seated())
        self.code: int | None = None
        self._phase, self._until = "starting", _NEVER  # a start with a loss before all have begun is over
        self._why, self._lost, self._since = "", list[int](), now
        self._step: int | None = None  # at which the last round began
        self._same_step = self._code = 0
        self._times: dict[str, float] = {}  # the longest of all ranks
        self._texts: dict[str, str] = {}  # that rank 0 has told the others of this round
        self._failed = 0  # rounds that not all have begun, one after the other
        self._in_vain = 0  # processes that have ended before they were ready, one after the other
        self._places: list[tuple[str, int]] = []  # where others are to be started, when that keeps nobody waiting

    # What is heard

    def ready(self, name: str, now: float) -> None:
        """Hear that a process waits for its rank; one that has a rank gets that.

        It was started with it; or it has begun its program anew, and what it was told since is lost.
        """
        member = self._members[name]
        member.is_ready, self._in_vain = True, 0
        if member.rank is not None and self._phase in ("starting", "seating"):
            self._give(member)
            for what, text in self._texts.items():
                self._tell_text(member, what, text)
        self._look(now)

    def left(self, name: str, number: int, now: float) -> None:
        """Hear that a process has left a round."""
        member = self._members[name]
        member.left, member.is_ready = number, True
        self._look(now)

    def here(self, name: str, number: int) -> None:
        """Hear that a process has come to a round, and waits for others."""
        self._members[name].is_here = number == self.round

    def trains(self, name: str, number: int, step: int, times: dict[str, float], now: float) -> None:
        """Hear that a process has begun a round, at a step, and how long what took, seconds."""
        member = self._members[name]
        if number != self.round or self._phase not in ("starting", "seating"):
            return
        member.is_in, member.is_ready = True, False
        self._times |= {what: max(self._times.get(what, 0.0), took) for what, took in times.items()}
        if not all(one.is_in for one in self._seated()):
            return
        if self._phase == "seating":
            self._acts.note("recovered", round=self.round, lost=self._lost, why=self._why, step=step,
                            seconds=round(now - self._since, 3), times=self._times)  # fmt: skip
            self._failed = 0
        self._same_step = self._same_step + 1 if step == self._step else 1
        if self._same_step > _SAME_STEP:
            self._end(f"{self._named()} was lost, as before: {_SAME_STEP} rounds had begun at step {step}", self._code)
            return
        self._step, self._phase, self._until = step, "training", _NEVER
        self._lost = []
        self._fill_places()

    def done(self, name: str, number: int) -> None:
        """Hear that the training of a process has come to its end in a round: it cannot go back any more."""
        self._members[name].is_done = number == self.round and self._phase == "training"

    def text(self, name: str, number: int, what: str, text: str) -> None:
        """Hear what rank 0 tells all others of a round."""
        if number == self.round and self._members[name].rank == 0:
            self._texts[what] = text
            for one in self._staying():
                self._tell_text(one, what, text)

    def ended(self, name: str, code: int, why: str, now: float) -> None:
        """Hear that a process has ended; another one is started in the place of one that failed, as soon as all train.

        Args:
            name: of it.
            code: as a shell says it.
            why: in words.
            now: seconds.
        """
        member = self._members[name]
        if member.code is not None or self.over:
            return
        member.code = code
        self._in_vain += member.rank is None and not member.is_ready
        if member.rank is not None and (code or not member.is_in):
            self._lose([member], why, now)
        elif all(one.code == 0 for one in self._seated()):
            self.over, self.code = "all ranks came to their end", 0
        if code and not self.over and self._in_vain < _IN_VAIN:
            self._places.append((member.host, member.local))
        self._look(now)
        self._fill_places()

    def host_lost(self, host: str, why: str, now: float) -> None:
        """Hear that a host is lost, with all of its processes."""
        lost = [one for one in self._members.values() if one.host == host and one.code is None and not self.over]
        self._places = [place for place in self._places if place[0] != host]
        for member in lost:
            member.code = 255
        if ranks := [one for one in lost if one.rank is not None]:
            self._lose(ranks, why, now)
        self._look(now)
        self._fill_places()

    def host_back(self, host: str) -> None:
        """Hear that a host is there again which was lost: as many processes are started there as it had."""
        for local in sorted({one.local for one in self._members.values() if one.host == host}):
            if not self.over:
                self._start(host, local)

    def look(self, now: float) -> None:
        """See whether a deadline has passed."""
        if self.over or now < self._until:
            return
        if self._phase == "waiting":
            self._end(f"no process was ready in time to take the place of {self._named()}", self._code)
            return
        self._until = now + self._deadlines.ready_s  # for those to end that are killed
        if self._phase == "leaving":
            late = [one for one in self._staying() if one.left < self.round]
        else:  # who is there waits for who is not
            late = [one for one in self._staying() if not one.is_here and not one.is_in]
            late = late or [one for one in self._staying() if not one.is_in]
        for one in late:
            self._acts.note("late", round=self.round, rank=one.rank, phase=self._phase)
            self._acts.kill(one.name)

    @property
    def until(self) -> float:
        """When `look` has something to do."""
        return self._until

    # What follows

    def _fill_places(self) -> None:
        """Start what is to be started; not while others recover who do not need it, as imports take all cores."""
        empty = [one for one in self._seated() if one.code is not None]
        spares = [one for one in self._members.values() if one.rank is None and one.code is None]
        if self.over or (self._phase != "training" and len(spares) >= len(empty)):
            return
        places, self._places = self._places, []
        for host, local in places:
            self._start(host, local)

    def _start(self, host: str, local: int) -> None:
        fresh = self._acts.start(host, local)
        self._members[fresh] = Member(fresh, host, local)

    def _seated(self) -> list[Member]:
        """The processes that have a rank, in the order of these; one that is lost has it until another one gets it."""
        return sorted((one for one in self._members.values() if one.rank is not None), key=lambda one: one.rank or 0)

    def _staying(self) -> list[Member]:
        return [one for one in self._seated() if one.code is None]

    def _named(self) -> str:
        ranks = ", ".join(map(str, self._lost))
        return f"{'ranks' if len(self._lost) > 1 else 'rank'} {ranks} ({self._why})"

    def _lose(self, members: Sequence[Member], why: str, now: float) -> None:
        if not self._lost:
            self._why, self._since, self._code = why, now, members[0].code or 0
        self._lost = sorted({*self._lost, *(one.rank for one in members if one.rank is not None)})
        if all(one.code for one in self._seated()):
            self._end(f"all ranks were lost, the last one {self._named()}", self._code)
        elif self._phase == "starting":
            self._end(f"{self._named()} was lost before all had begun", self._code)
        elif any(one.code == 0 or (one.is_done and one.code is None) for one in self._seated()):
            self._end(f"{self._named()} was lost when others had come to their end", self._code)
        elif self._failed >= _IN_VAIN:
            self._end(f"{self._named()} was lost, and {_IN_VAIN} rounds had failed before all had begun", self._code)
        elif self._phase in ("training", "seating"):
            self._failed += self._phase == "seating"
            self._phase, self._until = "leaving", now + self._deadlines.leave_s
            for one in self._staying():
                one.is_in = False
                self._acts.tell(one.name, {"lost": self.round, "ranks": self._lost, "why": why})

    def _look(self, now: float) -> None:
        """Begin the next round, if all have come so far."""
        if self.over or self._phase not in ("leaving", "waiting"):
            return
        if any(one.left < self.round for one in self._staying()):
            return
        empty = [one for one in self._seated() if one.code is not None]
        waiting = [one for one in self._members.values() if one.rank is None and one.is_ready and one.code is None]
        if len(waiting) < len(empty):
            if self._phase == "leaving":
                self._phase, self._until = "waiting", now + self._deadlines.ready_s
            return
        own = {one.host for one in waiting}
        for lost in sorted(empty, key=lambda one: one.host not in own):  # its host may have its slots
            best = min(waiting, key=lambda one: one.host != lost.host)
            waiting.remove(best)
            best.rank, lost.rank = lost.rank, None
        self.round += 1
        self._phase, self._until = "seating", now + self._deadlines.ready_s
        self._times, self._texts = {}, {}
        self.hosts = tuple(one.host for one in self._seated())
        for one in self._seated():
            one.is_here = one.is_in = False
            self._give(one)

    def _give(self, member: Member) -> None:
        seat = {"round": self.round, "rank": member.rank, "size": self.size, "lost_s": self._deadlines.lost_s,
                "ready_s": self._deadlines.ready_s}  # fmt: skip
        self._acts.tell(member.name, {"seat": seat})

    def _tell_text(self, member: Member, what: str, text: str) -> None:
        self._acts.tell(member.name, {"text": self.round, "what": what, "is": text})

    def _end(self, why: str, code: int) -> None:
        self.over, self.code = why, code or 1
