"""Recovery in place: real trainers in `keep_alive`, the real `Membership`, and messages between them that take a while.

Simulated is what lies between: `run.started_ranks`, the agent of each host, and the host's file locks.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import couriers
import threads
from faults import Plan, draw_plan
from scheduler import NEVER, Process
from states import NO_LAUNCH
from training import Training

import mlflash
import mlflash.checkpointer.keep_alive as in_place
import mlflash.run.decider_link as decider_link
from mlflash.checkpointer import process_end
from mlflash.crash_points import POINTS
from mlflash.launch.cause import cause_of
from mlflash.launch.launcher_variables import KEPT
from mlflash.launch.lines import Lines, pack
from mlflash.memory.node_directory import NodeDirectory
from mlflash.run.membership import Deadlines, Member, Membership

if TYPE_CHECKING:
    from history import History

_ALL_ENDED = "all ranks came to their end"
_KILLED = 137
_RECOVERS_S = 20.0  # from the notice of a loss until all train again
_ANSWERS_S = 5.0  # a courier that is stopped for longer may answer too late
_PLANNED = 0.2  # how often ranks are to leave a host when a rank has begun a round
_IMPORTS_S = 5.0  # of a process that is started anew
_FAULTS_NEEDED = {
    _ALL_ENDED: 0, "before all ranks had begun": 1, "no process was ready": 1, "all ranks were lost": 1,
    "after other ranks had finished": 1, "had already begun at step": 2, "rounds had failed": 4,
}  # fmt: skip


class _Trainers(couriers.Socket):
    """The end of a connection that a trainer has."""

    def settimeout(self, _: None) -> None:
        pass

    def sendmsg(self, parts: list[bytes], _: object) -> int:
        self.sendall(parts[0])
        return len(parts[0])


class _Line(couriers.Socket):
    """The end that the supervisor has."""

    name = ""

    def __init__(self, supervisor: Supervisor):
        super().__init__(supervisor.kernel, supervisor.delay)
        self._supervisor, self._received = supervisor, Lines(1 << 16)

    def _arrive(self, data: bytes, fds: list[int] | None = None) -> None:
        for message in self._received.add(data):
            self._supervisor.take(self, message)


class Supervisor:
    """Does what `mlflash run --keep-alive` does in one launch, and makes its processes.

    Attributes:
        membership: decides.
        last: the step at which the training ends; 0: not known yet.
        codes: exit codes of trainers that have ended by themselves, by name.
    """

    def __init__(self, history: History):
        self._history, self.kernel, self._launch = history, history.kernel, history.launch
        random, setting = self.kernel.random, history.setting
        hosts = [f"node{rank // setting.per_node}" for rank in range(setting.ranks)]
        members = [Member(f"{host}#{rank}", host, rank, rank) for rank, host in enumerate(hosts)]
        for host in random.choice([[], hosts[:1], ["spare"], ["spare"], ["spare", "spare2"]]):
            members += [Member(f"{host}#{9 + local}", host, 9 + local) for local in range(setting.per_node)]
        self._deadlines = Deadlines(random.choice([1.0, 10.0]), 30.0, 120.0)
        self.membership = Membership(members, self, self._deadlines, self.kernel.now)
        self._hosts, self.last, self.codes = self.membership.hosts, 0, dict[str, int]()
        self.processes: dict[str, Process] = {}
        self._host_of: dict[Process, str] = {}
        self._lines: dict[str, _Line] = {}
        self._untold: dict[str, list[dict[str, Any]]] = {}
        self._dead: set[str] = set()  # hosts
        self._is_over = self._is_closed = False
        self._due = NEVER
        self._problems: list[str] = []
        self.faults, self._has_courier_died = 0, False
        self._planning = Random(history.seed)
        self._waits, self.rest_s = random.random() < 0.85, random.choice([0.0, 0.1, 0.5])
        if self._waits and not self._launch.is_last:
            self._launch.plan = draw_plan(random, setting, POINTS, self._launch.saves, False, False)
        for member in members:
            self._make(member.name, member.host, member.rank)

    def _make(self, name: str, host: str, rank: int | None) -> Process:
        size, number = self._history.setting.ranks, len(self.processes)
        process = self._history.process(100 + number if rank is None else rank, rank is not None)
        self._launch.trainers.append(process)
        self.processes[name], self._host_of[process] = process, host
        environment = process.globals[os, "environ"]
        environment[KEPT] = json.dumps({"socket": "supervisor", "name": name, "size": size, "waits": rank is None})
        process.at_death.append(lambda: self._died(name, host))
        return process

    def delay(self) -> float:
        return float(10 ** self.kernel.random.uniform(-5, -0.5))

    # Messages

    def connect(self) -> _Trainers:
        ours, theirs = _Trainers(self.kernel, self.delay), _Line(self)
        ours.peer, theirs.peer, ours.owner = theirs, ours, self.kernel.current.process  # type: ignore[union-attr]
        return ours

    def take(self, line: _Line, message: dict[str, Any]) -> None:
        """Do what `KeptRanks` does with a message of a process."""
        membership, name, now = self.membership, line.name, self.kernel.now
        self.kernel.note(f"supervisor hears {name} {message}")
        if self._is_closed or (name and self._host_of[self.processes[name]] in self._dead):
            return
        match message:
            case {"name": str(name)}:
                line.name, self._lines[name] = name, line
                for told in self._untold.pop(name, []):
                    self.tell(name, told)
            case {"ready": _}:
                membership.ready(name, now)
            case {"left": number, "unit": unit}:
                membership.left(name, number, now, unit)
            case {"saved": number, "step": step}:
                membership.saved(name, number, step)
            case {"paused": number}:
                membership.paused(name, number, now)
            case {"here": number}:
                membership.here(name, number)
            case {"trains": number, "step": step, "times": times, "unit": unit}:
                membership.trains(name, number, step, times, now, unit)
                if self._planning.random() < _PLANNED and not membership.move(
                    self._planning.choice(membership.hosts), now
                ):
                    self.faults += 1  # a spare is used up
            case {"done": number}:
                membership.done(name, number)
            case {"text": number, "what": what, "is": text}:
                membership.text(name, number, what, text)
            case _:
                self._problems.append(f"the supervisor does not understand {message}")
        self._go_on()

    def _go_on(self) -> None:
        membership, kernel = self.membership, self.kernel
        if membership.over and not self._is_over:
            self._is_over = True
            kernel.note(f"supervisor: {membership.over}")
            kernel.after(self.delay(), self._end)
        elif not membership.over and membership.until < self._due:
            self._due = membership.until
            kernel.at(max(self._due, kernel.now), self._look)

    def _look(self) -> None:
        self._due = NEVER
        self.membership.look(self.kernel.now)
        self._go_on()

    def _end(self) -> None:
        self._is_closed = True
        for process in self.processes.values():
            self.kernel.kill(process)

    def _report(self, host: str, call: Callable[[], None]) -> None:
        if not self._is_closed and host not in self._dead:
            call()
            self._go_on()

    def _died(self, name: str, host: str) -> None:
        code, line = self.codes.get(name, _KILLED), self._lines.get(name)
        sent = line.peer._last if line is not None else 0.0
        report = lambda: self.membership.ended(name, code, cause_of(code), self.kernel.now)  # noqa: E731
        self.kernel.at(max(sent, self.kernel.now + self.delay()), lambda: self._report(host, report))

    # What `Membership` calls

    def tell(self, name: str, message: dict[str, Any]) -> None:
        if name not in self._lines:
            self._untold.setdefault(name, []).append(message)
            return
        self.kernel.note(f"supervisor tells {name} {message}")
        process = self.processes[name]
        if "seat" in message:
            self._move(process, message["seat"]["rank"])
        if process.is_alive:
            self._lines[name].sendall(pack(message))

    def kill(self, name: str) -> None:
        self.kernel.after(self.delay(), lambda: self.kernel.kill(self.processes[name]))

    def lose(self, host: str, why: str) -> None:
        self._problems.append(f"{host} is given up: {why}")

    def start(self, host: str, local: int) -> str:
        name = f"{host}#{local}.{len(self.processes)}"
        process = self._make(name, host, None)
        begin = lambda: self.kernel.spawn(process, "main", Kept(self._history, process).run)  # noqa: E731
        self.kernel.after(_IMPORTS_S * self.kernel.random.random(), lambda: process.is_alive and begin())
        return name

    def note(self, event: str, **fields: Any) -> None:
        self.kernel.note(f"supervisor notes {event} {fields}")
        self._history.outcomes[f"in place: {event}"] += 1
        if event == "late" and (self.faults < 2 or (fields["phase"] == "leaving" and self._launch.plan.stop is None)):
            self._problems.append(f"after {self.faults} faults, late: {fields}")
        if event == "recovered" and self.faults < 2 and fields["seconds"] > self._deadlines.lost_s + _RECOVERS_S:
            self._problems.append(f"it took {fields['seconds']} s until all trained again: {fields}")

    @property
    def is_over(self) -> bool:
        return self._is_closed and all(not process.is_alive for process in self.processes.values())

    # Faults

    @property
    def is_due(self) -> bool:
        """Whether the next fault of the plan may come: mostly not before all train."""
        return not self._waits or self.faults > 0 or self.membership._phase == "training"

    def carry_out(self, plan: Plan) -> None:
        """Let die what a plan says, and draw the next fault of this launch."""
        history, random = self._history, self.kernel.random
        everyone = [*self.processes.values(), *couriers.processes()]
        seated = [process for process in self.processes.values() if process.rank == plan.who and process.is_alive]
        self.faults += 1
        if plan.dies == "all" and random.random() < 0.7:
            plan.dies = "rank"
        if plan.dies == "all":
            self._is_closed = True
            history.die(everyone)
        elif plan.dies == "node":
            self._burn(self.membership.hosts[plan.who])
        else:
            self._has_courier_died |= plan.dies == "courier"
            with_couriers = plan.dies == "courier" or random.random() < 0.5
            killed = [courier for courier in couriers.processes() if courier.parent in seated and with_couriers]
            history.die([*killed, *(seated if plan.dies == "rank" else [])])
        if plan.second:
            other = random.choice(everyone)
            self._launch.ends_at[other] = other.points + plan.second
            self.faults += 1
            self._has_courier_died |= other.parent is not None
        elif plan.dies != "all" and random.random() < 0.5:
            self._launch.plan, self._launch.triggered = self._next_fault(), False

    def _next_fault(self) -> Plan:
        """Draw a fault that comes while a round begins, or in it."""
        random = self._history.kernel.random
        plan = draw_plan(random, self._history.setting, POINTS, self._launch.saves, False, True)
        plan.phase, plan.nth = "restoring", 1
        if random.random() < 0.6:
            plan.point, plan.times = random.choice([point for point in POINTS if point.startswith("round.")]), 1
        return plan

    def _burn(self, host: str) -> None:
        """Let a host die, with its memory."""
        setting, kernel = self._history.setting, self.kernel
        dead = [process for process in self.processes.values() if self._host_of[process] == host]
        dead += [courier for courier in couriers.processes() if courier.parent in dead]
        couriers.WORLD.silent |= {*dead}
        self._dead.add(host)
        self._history.die(dead)
        for node in range(setting.nodes):
            if {*self._hosts[node * setting.per_node : (node + 1) * setting.per_node]} == {host}:
                self._lose_memory(node)
        kernel.after(kernel.random.random() * self._deadlines.lost_s, lambda: self._lose(host))

    def _lose(self, host: str) -> None:
        if not self._is_closed:
            self.membership.host_lost(host, f"{host} is lost", self.kernel.now)
            self._go_on()

    def _lose_memory(self, node: int) -> None:
        if self._history.remove_memory(node, "wiped in place"):
            self._history.oracle.lose(self._launch, node)

    def _move(self, process: Process, rank: int) -> None:
        """Let a process have a rank. What this rank had in the memory of another host is out of reach."""
        process.rank = rank
        host, before = self._host_of[process], self._hosts[rank]
        self._hosts = (*self._hosts[:rank], host, *self._hosts[rank + 1 :])
        if host != before and before not in self._dead and self._history.setting.per_node == 1:
            self._lose_memory(rank)

    def stopped(self, process: Process, seconds: float) -> None:
        """Kill a trainer that is stopped for long, as the agent of its host does."""
        self.faults += 1
        if process not in self._host_of:  # a courier, of which an answer may be late by then
            self._has_courier_died |= seconds > _ANSWERS_S
        if process in self._host_of and seconds > self._deadlines.lost_s:
            self.kernel.after(self._deadlines.lost_s, lambda: self._history.die([process]))

    # What must hold

    def problems(self, why: str) -> list[str]:
        """What was wrong in this launch; ``why`` says why it never ended."""
        launch, over, problems = self._launch, self.membership.over, self._problems
        if why and launch.died:
            problems.append(f"it hangs: {why}")
        for record in launch.of("unrestorable") + launch.of("gave up"):
            if record.least is not None:
                problems.append(f"rank {record.rank}: {record.least} was committed: {record.event} {record.text}")
        problems += [f"rank {record.rank}: {record.text}" for record in launch.of("error")
                     if not self._has_courier_died]  # fmt: skip
        ended = {record.rank for record in launch.of("end") if record.step == self.last}
        if over == _ALL_ENDED and len(ended) != self._history.setting.ranks:
            problems.append(f"it came to its end, but only ranks {sorted(ended)} at step {self.last}")
        how = next((text for text in _FAULTS_NEEDED if text in over), over or "the launcher is killed")
        needed = _FAULTS_NEEDED.get(how, 1)
        if self.faults < needed and not launch.of("unrestorable") and not launch.of("gave up"):
            problems.append(f"after {self.faults} faults: {over}")
        if "no process was ready" in over and self.faults < 2 and self._spare_hosts() and not launch.of("unrestorable"):
            problems.append(f"there was a spare, but {over}")
        self._history.outcomes[f"in place: {how}"] += 1
        return problems

    def _spare_hosts(self) -> set[str]:
        return {host for host in self._host_of.values() if host.startswith("spare")} - self._dead


class Kept(Training):
    def run(self) -> None:
        supervisor, code = self._history.supervisor, 1
        before = self._oracle.newest[1] if self._oracle.newest else 0
        self._state = self._states.at(0, before, NO_LAUNCH)
        self._launch.phases["restoring"] += 1
        try:
            in_place.keep_alive(self._train_on, self._state, **self._settings())
            code = 0
        except SystemExit as error:
            self._note("gave up", text=str(error), least=self._oracle.least(self._launch))
        except mlflash.errors.Unrestorable as error:
            self._note("unrestorable", text=str(error), least=self._oracle.least(self._launch))
        except Exception as error:
            self._note("error", error=error, text="".join(traceback.format_exception(error))[-3000:])
            self._history.outcomes[type(error).__name__] += 1
        process_end._end_all()
        name = next(name for name, process in supervisor.processes.items() if process is self._process)
        supervisor.codes[name] = code
        self._history.kernel.kill(self._process)

    def _train_on(self, ckpt: mlflash.Checkpointer, start: int) -> None:
        """Be called by `keep_alive` in each round."""
        link, launch, state, supervisor = decider_link.decider(), self._launch, self._state, self._history.supervisor
        assert link is not None
        self._ckpt, self._rank, number = ckpt, self._process.rank, link.seat(0).round
        self._number = 100 * launch.number + number
        found = state["launch"] if start else None
        wrong = [] if found is None else self._states.differences(state, self._rank, start, found, False)
        self._note("restored", step=start or None, launch=found, wrong=wrong, round=number,
                   least=self._oracle.least(launch))  # fmt: skip
        supervisor.last = supervisor.last or start + launch.saves
        for step in range(start + 1, supervisor.last + 1):
            state.update(self._advance(state, step))
            self._save(state, step)
            self._history.kernel.sleep(supervisor.rest_s)
        self._timed("wait", ckpt.wait)
        self._note("end", step=supervisor.last)


_LOCKS: dict[tuple[int, int, int], Process] = {}


def install() -> None:
    """Replace the connection to the supervisor, and locks of files: they would not exclude simulated processes."""
    decider_link._connect = lambda name: couriers.WORLD.history.supervisor.connect()  # type: ignore[assignment]
    close = NodeDirectory.close

    def try_lock(held: NodeDirectory, start: int, length: int) -> bool:
        process, key = _running(), (os.fstat(held._lock_fd).st_ino, start, length)
        holder = _LOCKS.setdefault(key, process)
        if not holder.is_alive:
            holder = _LOCKS[key] = process
        return holder is process

    def close_and_unlock(held: NodeDirectory) -> None:
        if held._lock_fd >= 0:
            number, process = os.fstat(held._lock_fd).st_ino, _running()
            for key in [key for key, holder in _LOCKS.items() if key[0] == number and holder is process]:
                del _LOCKS[key]
        close(held)

    NodeDirectory._try_lock, NodeDirectory.close = try_lock, close_and_unlock  # type: ignore[method-assign]


def _running() -> Any:
    task = threads.scheduler().current
    return None if task is None else task.process
