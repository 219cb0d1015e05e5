"""Decides which process has which rank in a training that survives lost processes, and when rounds begin. Pure.

During a round each rank belongs to the same process. When a process with a rank ends or its host is lost, the round is
over. All other processes are told, leave their step and report that. Waiting processes (spares) get the lost ranks, and
all begin the next round. If too few wait and the job may have fewer ranks, the others are numbered again and begin the
next round with fewer.

A round also ends because it is planned: when ranks must leave a host, or when processes wait that can make the job
larger again. Then all ranks pause after the same save, so that no step is lost. Each is asked for its newest save, and
all pause after the next one that is newer than all answers.

In doubtful cases all processes end, and the job is started again. These are: nobody can replace a lost rank, some rank
had already finished, or rounds fail again at the same step. If the same error ends two rounds at the same step, another
start would not help (`Membership.is_repeated`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

from ..launch.cause import Cause

_SAME_STEP = 2  # rounds that may begin at one step; a third would probably fail, too
_KILLS = 2  # how often a process is killed, before its host counts as lost
_LOOK_S = 1.0  # between two looks for a plan
_GROWS_AGAIN_S = 60.0  # from a growth that fails to the next one, and twice as long after each one that fails
_IN_VAIN = 3  # processes that may end before they are ready, and rounds that may fail before all ranks have begun
NEVER = float("inf")


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long each phase may take, in seconds."""

    # a host without a sign of life for this long is lost; a process that notices a lost rank first waits as long
    lost_s: float = 10.0
    leave_s: float = 30.0  # to leave a step
    hang_s: float = 0.0  # a rank without progress for so long, and for some of its steps, may hang; 0: none does
    ready_s: float = 120.0  # then to the next step: for couriers, process groups, and a spare that must become ready


class Acts(Protocol):
    """What `Membership` needs done by the owner of the processes."""

    def tell(self, name: str, message: dict[str, Any]) -> None:
        """Send a message to a process."""

    def kill(self, name: str) -> None:
        """Kill a process. `Membership.ended` must be called when it has ended."""

    def lose(self, host: str, why: str) -> None:
        """Count a host as lost. `Membership.host_lost` must be called later, not in this call."""

    def start(self, host: str, local: int) -> str:
        """Start a spare process in the place of one that has ended there; return its name."""

    def note(self, event: str, **fields: Any) -> None:
        """Write down an event."""


@dataclasses.dataclass(frozen=True)
class Stuck:
    """Where a process is. ``count``: collectives that it has begun in this round."""

    count: int
    idle_s: float  # without progress
    limit_s: float  # how long it may take
    waits: bool  # whether a collective that it has begun has not ended
    after: str  # what it did last
    where: str  # the line of its program


@dataclasses.dataclass
class Member:
    """A process."""

    name: str
    host: str  # host, local: the host, and the number of the process on it
    local: int
    rank: int | None = None  # that it has, or had when it ended; None while it waits for one
    trained: int | None = None  # the rank that it had when all ranks trained last; None: it had none then
    since: float = 0.0  # when it was started
    is_ready: bool = False  # whether it has reported that it waits
    left: int = 0  # the last round that it has reported to have left; 0 before the first round
    is_here: bool = False  # whether it has reached this round with the rank that it has in it
    is_in: bool = False
    is_done: bool = False  # whether its training has finished and the process has not ended yet
    saved: int | None = None  # in a plan: its newest save when it was asked
    is_paused: bool = False  # in a plan: whether it has paused
    unit: int = 1  # as it knows, the number of ranks is a multiple of it; 0: it cannot change
    kills: int = 0  # how often it was killed
    stuck: Stuck | None = None  # where it is, since some rank said that it makes no progress
    hung: str = ""  # where it hung, for which it was killed
    code: int | None = None


class Membership:
    """The processes of one start of a job.

    Args:
        least: the smallest number of ranks with which the job goes on; 0: as many as it has at first.
        most: the largest number of ranks; 0: as many as it has at first.
    """

    def __init__(self, members: Sequence[Member], acts: Acts, deadlines: Deadlines, now: float, least: int = 0,
                 most: int = 0):  # fmt: skip
        self.members = {member.name: member for member in members}
        self._acts, self._deadlines = acts, deadlines
        self.size = sum(member.rank is not None for member in members)
        self._full, self._least = max(most, self.size), min(least or self.size, self.size)
        self._plan = ""  # why a planned change is about to come
        # While all train: when to give a plan up, to judge who hangs, and to look for a plan again.
        self._plan_until = self._judge_at = self._plan_at = NEVER
        self._grows_after, self._growth_s = now, _GROWS_AGAIN_S  # no growth before; how long after one that fails
        self._grows = self._is_to_grow = False  # whether this round is larger than the last one, or was to be
        self._leaving: list[str] = []  # hosts that ranks must leave, those first that were asked for first
        self.round, self.over = 1, ""  # over: why there is no next round; "" while there may be one
        self.hosts = tuple(member.host for member in self._seated())
        self.code: int | None = None  # exit code, if it is over or all have finished
        self._phase, self.until = "starting", NEVER  # a loss before all have begun ends the start
        self._why, self._lost, self._since = "", list[int](), now
        self.cause = Cause("exit", "no rank was lost")  # of the last loss
        self._cause_before: tuple[Cause, int] | None = None  # of the loss before, and the step of the round after it
        self.is_repeated = False  # whether it is over because the same error came again after the same step
        self._step: int | None = None  # the step at which the last round began
        self._same_step = self._code = 0
        self._times: dict[str, float] = {}  # the longest of all ranks, by name
        self._texts: dict[str, str] = {}  # from rank 0 to the others, in this round
        self._failed = 0  # consecutive rounds that not all ranks have begun
        self._in_vain = 0  # consecutive processes that have ended before they were ready
        self._places: list[tuple[str, int]] = []  # where to start other processes, as soon as nobody has to wait for it
        for member in members:
            member.since = now

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
        self._make_plan(now)

    def left(self, name: str, number: int, now: float, unit: int = 1) -> None:
        """Note that a process has left a round, and of what the number of ranks must be a multiple; 0: it is fixed."""
        member = self.members[name]
        member.left, member.is_ready, member.unit = number, True, unit
        self._look(now)

    def here(self, name: str, number: int) -> None:
        """Note that a process has reached a round and waits for others."""
        self.members[name].is_here = number == self.round

    def trains(self, name: str, number: int, step: int, times: dict[str, float], now: float, unit: int = 1) -> None:
        """Note that a process trains in a round from a step on.

        Args:
            times: how long each part took, in seconds.
            unit: see `left`.
        """
        member = self.members[name]
        if number != self.round or self._phase not in ("starting", "seating"):
            return
        member.is_in, member.is_ready, member.unit = True, False, unit
        self._times |= {what: max(self._times.get(what, 0.0), took) for what, took in times.items()}
        if not all(other.is_in for other in self._seated()):
            return
        if self._lost and self._is_again(step):
            return
        if self._phase == "seating":
            self._acts.note("recovered" if self._lost else "moved", round=self.round, lost=self._lost, why=self._why,
                            step=step, ranks=self.size, seconds=round(now - self._since, 3),
                            times=self._times, **({"cause": self.cause.fields} if self._lost else {}))  # fmt: skip
            self._failed = 0
            if self._grows:
                self._growth_s = _GROWS_AGAIN_S
        self._same_step = self._same_step + 1 if step == self._step else 1
        if self._same_step > _SAME_STEP:
            self._end(f"{self._named()} was lost, and {_SAME_STEP} rounds had already begun at step {step}")
            return
        self._step, self._phase, self.until = step, "training", NEVER
        self._lost = []
        for other in self.members.values():
            other.trained = other.rank
        self._fill_places(now)
        self._make_plan(now)

    def _is_again(self, step: int) -> bool:
        """End if the error that has ended the last round has already ended a round before, after the same step."""
        before, self._cause_before = self._cause_before, (self.cause, step)
        self.is_repeated = before is not None and before[1] == step and self.cause.is_again(before[0])
        if self.is_repeated:
            self._end(f"{self._named()} was lost, by the same error as before, after step {step} again")
        return self.is_repeated

    def saved(self, name: str, number: int, step: int) -> None:
        """Note the newest save of a process in a planned round end; all pause after the next save of all."""
        if self._is_planned(number):
            self.members[name].saved = step
            steps = [member.saved for member in self._staying() if member.saved is not None]
            if len(steps) == len(self._staying()):
                self._tell_all({"pause_after": self.round, "step": max(steps)})

    def paused(self, name: str, number: int, now: float) -> None:
        """Note that a process has paused after a committed save. The last one ends the round."""
        if self._is_planned(number):
            self.members[name].is_paused = True
            if all(member.is_paused for member in self._staying()):
                self._why, self._since, plan = self._plan, now, self._plan
                self._end_round(plan, now)
            elif self._plan_until == NEVER:
                self._plan_until = now + self._deadlines.ready_s
                self._set_timer()

    def stuck(self, name: str, number: int, at: Stuck, now: float) -> None:
        """Note where a process is. The first one says it because it makes no progress; then all others are asked."""
        if number != self.round or self._phase != "training":
            return
        staying, is_first = self._staying(), self._judge_at == NEVER
        if any(member.hung for member in staying):  # it was killed, and its end has not been reported yet
            return
        self.members[name].stuck = at
        if is_first:
            self._judge_at = now + self._deadlines.lost_s
            self._set_timer()
            for member in staying:
                if member.name != name:
                    member.stuck = None
                    self._acts.tell(member.name, {"where": self.round})
        if all(member.stuck is not None for member in staying):
            self._judge(now)

    def _judge(self, now: float) -> None:
        """Kill the ranks that hang, when all have said where they are, or have had the time to.

        Those hang that have begun the fewest collectives, if others have begun more, which wait for them; otherwise
        those that do not say where they are; otherwise those that wait in no collective, if others do, as groups of
        some ranks are not counted. If all have said it and wait in collectives, nobody is to blame, and all go back to
        the newest commit.
        """
        self._judge_at = NEVER
        self._set_timer()
        staying = self._staying()
        said = [member.stuck for member in staying if member.stuck is not None]
        if not said or self._has_finished() or any(at.idle_s < self._deadlines.hang_s / 2 for at in said):
            return  # somebody makes progress
        fewest, most = min(at.count for at in said), max(at.count for at in said)
        behind = [member for member in staying if member.stuck is not None and member.stuck.count == fewest < most]
        hung = behind or [member for member in staying if member.stuck is None]
        if not hung and any(at.waits for at in said):
            hung = [member for member in staying if member.stuck is not None and not member.stuck.waits]
        if any(member.stuck is not None and member.stuck.idle_s < member.stuck.limit_s for member in hung):
            return  # its own steps take longer, and it says when it has taken too long
        others = sorted({at.after for at in said if at.count == most})
        for member in hung:
            at = member.stuck
            idle_s = at.idle_s if at else max(other.idle_s for other in said)
            member.hung = f"it hung in {at.where}, after {at.after}" if at else "it hung, and its Python does not run"
            self._acts.note("hang", round=self.round, rank=member.rank, host=member.host, seconds=round(idle_s, 1),
                            why=member.hung, others=others)  # fmt: skip
            self._kill(member)
        places = ", ".join(sorted({at.where for at in said}))
        if hung:  # what cannot be killed is given up with its host
            self._judge_at = now + self._deadlines.ready_s
            self._set_timer()
        elif all(at.waits for at in said):
            self._why, self._since = f"all ranks waited for each other, in {places}", now
            self._end_round(self._why, now)

    def _kill(self, member: Member) -> None:
        """Kill a process; give up its host if it lives on after that."""
        member.kills += 1
        if member.kills > _KILLS:
            self._acts.lose(member.host, f"a process of it does not end: {member.name}")
        else:
            self._acts.kill(member.name)

    def _has_finished(self) -> bool:
        """Whether the training of any rank has ended."""
        return any(member.is_done or member.code == 0 for member in self._seated())

    def _set_timer(self) -> None:
        """While all train: look again when it is time for anything."""
        self.until = min(self._plan_until, self._judge_at, self._plan_at)

    def done(self, name: str, number: int) -> None:
        """Note that the training of a process has finished in a round. It cannot go back any more."""
        self.members[name].is_done = number == self.round and self._phase == "training"

    def text(self, name: str, number: int, what: str, text: str) -> None:
        if number == self.round and self.members[name].rank == 0:
            self._texts[what] = text
            for member in self._staying():
                self._tell_text(member, what, text)

    def ended(self, name: str, code: int, cause: Cause, now: float) -> None:
        """Note that a process has ended. If it failed, start another one in its place as soon as all ranks train."""
        member = self.members[name]
        if member.code is not None or self.over:
            return
        member.code = code
        is_to_end = member.host in self._leaving
        self._in_vain += member.rank is None and not member.is_ready and not is_to_end
        if member.rank is not None and (code or not member.is_in):
            hung = Cause("hang", member.hung, "", member.rank, member.host)
            self._lose([member], hung if member.hung else cause, now)
        elif all(other.code == 0 for other in self._seated()):
            self.over, self.code = "all ranks came to their end", 0
        if code and not self.over and self._in_vain < _IN_VAIN and not is_to_end:
            self._places.append((member.host, member.local))
        self._look(now)
        self._fill_places(now)
        self._make_plan(now)

    def host_lost(self, host: str, why: str, now: float) -> None:
        lost = [member for member in self._living() if member.host == host and not self.over]
        self._places = [place for place in self._places if place[0] != host]
        for member in lost:
            member.code = 255
        if ranks := [member for member in lost if member.rank is not None]:
            self._lose(ranks, Cause("node", why, host=host), now)
        self._look(now)
        self._fill_places(now)

    def host_back(self, host: str, now: float) -> None:
        """Note that a host has an agent again. If it was lost, start as many processes there as it had."""
        there = [member for member in self.members.values() if member.host == host]
        if self.over or not there or any(member.code is None for member in there):
            return
        self._leaving = [other for other in self._leaving if other != host]
        self._acts.note("host_back", host=host)
        for local in sorted({member.local for member in there}):
            self._start(host, local, now)

    def move(self, host: str, now: float) -> str:
        """Let all ranks leave a host at the next save, as soon as processes on other hosts can take them.

        Returns:
            Why they cannot leave it; "": they will.
        """
        if self.over or host in self._leaving:
            return self.over
        leaving = {*self._leaving, host}
        others = [member for member in (*self._staying(), *self._spares()) if member.host not in leaving]
        if not self._size_of(len(others)):
            return f"{len(others)} processes on other hosts are too few for {max(self._least, 1)} ranks"
        self._leaving.append(host)
        self._places = [place for place in self._places if place[0] != host]
        self._empty_hosts()
        self._make_plan(now)
        return ""

    def look(self, now: float) -> None:
        if self.over or now < self.until:
            return
        if self._phase == "training":
            self._look_while_training(now)
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
            self._kill(member)

    # Decisions

    def _look_while_training(self, now: float) -> None:
        if now >= self._judge_at:
            hung = [member for member in self._staying() if member.hung]
            for member in hung:
                self._kill(member)
            if hung:
                self._judge_at = now + self._deadlines.ready_s
            else:
                self._judge(now)
        elif now >= self._plan_until:  # not all have paused
            self._plan, self._plan_until, self._plan_at = "", NEVER, now + self._deadlines.ready_s
            self._tell_all({"go_on": self.round})
        elif now >= self._plan_at:
            self._plan_at = NEVER
            for member in self._spares():
                if not member.is_ready and now >= member.since + self._deadlines.ready_s:
                    self._kill(member)
            self._make_plan(now)
        if self._phase == "training":
            self._set_timer()

    def _make_plan(self, now: float) -> None:
        """Plan that the round ends after a save, if ranks must leave a host, or the job can become larger."""
        if self.over or self._plan or self._phase != "training" or self._has_finished():
            return
        staying, waiting = self._staying(), self._waiting()
        coming = [member for member in self._spares() if not member.is_ready]
        moving = [member for member in staying if member.host in self._leaving]
        larger = self._size_of(len(staying) + len(waiting)) > self.size
        if moving and len(waiting) >= len(moving):
            self._plan = f"{', '.join(sorted({member.host for member in moving}))} is to be left"
        elif coming:  # they may be needed, too
            late = [member.since + self._deadlines.ready_s for member in coming]
            self._plan_at = min(self._plan_at, *(max(at, now + _LOOK_S) for at in late))
        elif moving and self._size_of(len(staying) - len(moving) + len(waiting)):
            self._plan = f"{', '.join(sorted({member.host for member in moving}))} is to be left"
        elif larger and now >= self._grows_after:
            self._plan = f"{len(waiting)} more {'process waits' if len(waiting) == 1 else 'processes wait'} for a rank"
            self._is_to_grow = True
        elif larger:
            self._plan_at = min(self._plan_at, self._grows_after)
        self._set_timer()
        if self._plan:
            for member in staying:
                member.saved, member.is_paused = None, False
            self._tell_all({"pause": self.round})

    def _is_planned(self, number: int) -> bool:
        return number == self.round and self._phase == "training" and bool(self._plan)

    def _size_of(self, processes: int) -> int:
        """The number of ranks that a job of so many processes has; 0: they are too few."""
        units = [member.unit for member in self._staying()]
        if 0 in units:
            return self.size if processes >= self.size else 0
        unit = math.lcm(*units)
        size = self._full if processes >= self._full else processes // unit * unit
        return size if size >= max(self._least, 1) else 0

    def _spares(self) -> list[Member]:
        """The processes without a rank, on hosts that may have ranks."""
        return [member for member in self._living() if member.rank is None and member.host not in self._leaving]

    def _waiting(self) -> list[Member]:
        return [member for member in self._spares() if member.is_ready]

    def _empty_hosts(self) -> None:
        """Kill all processes without a rank on hosts that are to be left."""
        for member in self._living():
            if member.rank is None and member.host in self._leaving:
                self._acts.kill(member.name)

    def _fill_places(self, now: float) -> None:
        """Start missing processes, unless others are recovering and do not need them: imports take all cores."""
        empty = [member for member in self._seated() if member.code is not None]
        is_enough = len(self._spares()) >= len(empty) or self._size_of(len(self._staying()))
        if self.over or (is_enough and self._phase not in ("training", "waiting")):
            return
        places, self._places = self._places, []
        for host, local in places:
            self._start(host, local, now)

    def _start(self, host: str, local: int, now: float) -> None:
        fresh = self._acts.start(host, local)
        self.members[fresh] = Member(fresh, host, local, since=now)

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

    def _lose(self, members: Sequence[Member], cause: Cause, now: float) -> None:
        if not self._lost:
            self._since, self._code = now, members[0].code or 0
        if not self._lost or (self.cause.follows and not cause.follows):
            self.cause, self._why = cause, cause.reason
        ranks = (member.rank if member.trained is None else member.trained for member in members)
        self._lost = sorted({*self._lost, *(rank for rank in ranks if rank is not None)})
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
            if self._phase == "seating" and self._grows:
                self._put_growth_off(now)
            self._end_round(self._why, now)

    def _end_round(self, why: str, now: float) -> None:
        self._phase, self.until, self._plan = "leaving", now + self._deadlines.leave_s, ""
        self._plan_until = self._judge_at = self._plan_at = NEVER
        for member in self._staying():
            member.is_in = False
        self._tell_all({"lost": self.round, "ranks": self._lost, "why": why})

    def _look(self, now: float) -> None:
        if self.over or self._phase not in ("leaving", "waiting"):
            return
        if any(member.left < self.round for member in self._staying()):
            return
        if not self._fill_seats(now):
            if self._phase == "leaving":
                self._phase, self.until = "waiting", now + self._deadlines.ready_s
                self._fill_places(now)
            return
        self.round += 1
        self._phase, self.until = "seating", now + self._deadlines.ready_s
        self._times, self._texts = {}, {}
        self.hosts = tuple(member.host for member in self._seated())
        for member in self._seated():
            member.is_here = member.is_in = False
            self._give(member)
        self._empty_hosts()

    def _fill_seats(self, now: float) -> bool:
        """Give ranks for the next round, if there are enough processes. Return whether there are.

        Processes keep their ranks, and those that waited take those of lost ones, if possible on the same host, which
        may have the slots of the rank. If the number of ranks changes, all are numbered again in this order.
        """
        seats = self._seated()
        for count in range(len(self._leaving), -1, -1):
            staying = [member for member in self._staying() if member.host not in self._leaving[:count]]
            if size := self._size_of(len(staying) + len(self._waiting())):
                break
        else:
            return False
        staying, waiting = staying[:size], self._waiting()
        order: dict[int, Member] = {member.rank: member for member in staying if member.rank is not None}
        empty = [member for member in seats if member.rank not in order]
        hosts = {member.host for member in waiting}
        for lost in sorted(empty, key=lambda member: member.host not in hosts)[: size - len(order)]:
            best = min(waiting, key=lambda member: member.host != lost.host)
            waiting.remove(best)
            order[lost.rank or 0] = best
        for rank in itertools.count(len(seats)):
            if len(order) == size:
                break
            order[rank] = waiting.pop(0)
        for member in seats:
            member.rank = None
        for rank, number in enumerate(sorted(order)):
            order[number].rank = rank
        self._grows, self.size = size > self.size, size
        if self._is_to_grow and not self._grows:
            self._put_growth_off(now)
        self._is_to_grow = False
        return True

    def _put_growth_off(self, now: float) -> None:
        self._grows_after, self._growth_s = now + self._growth_s, 2 * self._growth_s

    def _give(self, member: Member) -> None:
        seat = {"round": self.round, "rank": member.rank, "size": self.size, "lost_s": self._deadlines.lost_s,
                "ready_s": self._deadlines.ready_s, "hang_s": self._deadlines.hang_s}  # fmt: skip
        self._acts.tell(member.name, {"seat": seat})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for member in self._staying():
            self._acts.tell(member.name, message)

    def _tell_text(self, member: Member, what: str, text: str) -> None:
        self._acts.tell(member.name, {"text": self.round, "what": what, "is": text})

    def _end(self, why: str) -> None:
        self.over, self.code = why, self._code or 1
