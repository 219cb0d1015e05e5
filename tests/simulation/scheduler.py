"""A deterministic scheduler: all processes of a simulated job in one thread, in virtual time, by a seed.

Each thread of each simulated process is a task (a greenlet). One task runs at a time. At each scheduling point (a call
of MPI, a poll, a wait, a crash point) the seed decides which task goes on. Time passes only when the scheduler says so.

A killed process is never resumed: its greenlets stay referenced, so that no `finally` and no `except` of them runs, as
after SIGKILL. FoundationDB and TigerBeetle test in this way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

import greenlet

NEVER = float("inf")
POLL_S = 0.05  # a wait up to so long is a poll: without news it may come back later, see `Scheduler.doze`
DOZE_S = 0.25  # how much later
_POINT_S = 1e-6  # virtual time that passes at each scheduling point


@dataclasses.dataclass(eq=False)
class Process:
    """A simulated process: a trainer or a courier.

    Attributes:
        rank: of the job.
        pid: its process number.
        parent: the trainer of a courier.
        is_alive: whether its tasks may run.
        stopped_until: it does not run before this time.
        points: scheduling points that it has come to.
        news: counts what its polls may be waiting for.
        globals: values of module variables that each process has of its own, while it does not run.
        at_death: called when it is killed.
    """

    rank: int
    pid: int
    name: str = "trainer"
    parent: Process | None = None
    is_alive: bool = True
    stopped_until: float = 0.0
    points: int = 0
    news: int = 0
    tasks: list[Task] = dataclasses.field(default_factory=list)
    dozing: list[tuple[Task, int]] = dataclasses.field(default_factory=list)
    globals: dict[tuple[Any, str], Any] = dataclasses.field(default_factory=dict)
    at_death: list[Callable[[], None]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
class Task:
    """A simulated thread.

    Attributes:
        wakes: grows whenever it is made ready, so that outdated timers are ignored.
        timed_out: whether a timer has woken it last.
        thread: the object that stands for it in the simulated module `threading`.
    """

    process: Process
    name: str
    number: int
    priority: float
    wakes: int = 0
    timed_out: bool = False
    done: bool = False
    seen_news: int = -1
    tested_at: int = -1
    due: float | None = None
    joiners: list[Task] = dataclasses.field(default_factory=list)
    thread: Any = None
    glet: Any = None


class Scheduler:
    """Runs the tasks of one history.

    Args:
        seed: of all choices.
        max_points: a history with more scheduling points has no end.
        max_s: neither has one that lasts longer, in virtual seconds.
        keeps_trace: whether `trace` gets a line for each event.

    Attributes:
        now: virtual seconds.
        current: the task that runs; None: none does.
        at_point: called at each scheduling point with the task and the name of the point.
        digest: of the trace: two runs of a seed have the same one.
    """

    def __init__(self, seed: int, max_points: int = 400_000, max_s: float = 20_000.0, keeps_trace: bool = False):
        self.random = random.Random(seed)
        self.now, self.points = 0.0, 0
        self.current: Task | None = None
        self.at_point: Callable[[Task, str], None] | None = None
        self.digest = hashlib.blake2b(digest_size=8)
        self.trace: list[str] | None = [] if keeps_trace else None
        self.max_points, self.max_s = max_points, max_s
        self.thread_errors: list[tuple[Process, str, Exception]] = []
        self._hub = greenlet.getcurrent()
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task | None, Any]] = []
        self._buried: list[Any] = []  # greenlets of the dead: nothing of them may run, not even at their collection
        self._loaded: Process | None = None
        self._numbers = self._timer_numbers = 0
        # How often a task goes on at a scheduling point; and whether the tasks have priorities, which makes long runs
        # of one task likely (PCT: Burckhardt et al., ASPLOS 2010).
        self._stays = self.random.choice((0.0, 0.0, 0.5, 0.9))
        self._has_priorities = self.random.random() < 1 / 3

    # Events

    def note(self, text: str) -> None:
        self.digest.update(text.encode())
        if self.trace is not None:
            self.trace.append(f"{self.now:12.6f} {text}")

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._push(when, None, call)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._push(self.now + seconds, None, call)

    def _push(self, when: float, task: Task | None, action: Any) -> None:
        self._timer_numbers += 1
        heapq.heappush(self._timers, (when, self._timer_numbers, task, action))

    # Tasks

    def spawn(self, process: Process, name: str, run: Callable[[], object]) -> Task:
        self._numbers += 1
        task = Task(process, name, self._numbers, self.random.random())

        def body() -> None:
            try:
                run()
            except Exception as error:
                self.note(f"{process.name} {process.rank}: thread {name} ended by {type(error).__name__}")
                self.thread_errors.append((process, name, error))
            task.done = True
            for joiner in task.joiners:
                self.wake(joiner)
            process.tasks.remove(task)
            self.tell_news(process)
            self.current = None
            while True:
                self._hub.switch()

        task.glet = greenlet.greenlet(body, parent=self._hub)
        process.tasks.append(task)
        self._buried.append(task.glet)
        self._ready.append(task)
        return task

    def wake(self, task: Task) -> None:
        if task.process.is_alive and not task.done:
            task.wakes += 1
            task.due, task.timed_out = None, False
            self._ready.append(task)

    def tell_news(self, process: Process | None = None) -> None:
        """Note that something has happened that a poll of a process (None: the running one) may be waiting for."""
        process = process or (self.current.process if self.current is not None else None)
        if process is None:
            return
        process.news += 1
        for task, wakes in process.dozing:
            if task.wakes == wakes and process.is_alive and task.due is not None:
                self._push(max(task.due, self.now), task, wakes)
        process.dozing.clear()

    def block(self, until: float = NEVER) -> bool:
        """Let the running task wait until something wakes it, or until a time; whether it was woken."""
        task = self.current
        assert task is not None, "the scheduler itself would wait"
        if until < NEVER:
            self._push(until, task, task.wakes)
        self._leave()
        return not task.timed_out

    def doze(self, seconds: float, more_s: float) -> bool:
        """Let the running task come back after a time; if its process has no news by then, up to ``more_s`` later.

        A poll without news would only look again: two thirds of all scheduling points were such polls. Returns whether
        something woke it before.
        """
        task = self.current
        assert task is not None, "the scheduler itself would wait"
        process = task.process
        soon = self.now + max(seconds, _POINT_S)
        late = soon if task.seen_news != process.news else max(soon, self.now + more_s)
        task.seen_news = process.news
        self._push(late, task, task.wakes)
        if late > soon:
            task.due = soon
            process.dozing.append((task, task.wakes))
        self._leave()
        return not task.timed_out

    def sleep(self, seconds: float) -> None:
        if self.current is None:
            return
        task = self.current
        if seconds <= 2e-3 and task.tested_at == task.process.news:
            task.tested_at = -1
            return  # a part of the poll whose test of a request has waited already
        self.point("sleep", leaves=False)
        self.doze(seconds, DOZE_S if seconds <= POLL_S else 0.0)

    def poll_request(self) -> None:
        """Wait a little in a test of a request that has not ended."""
        task = self.current
        if task is None:
            return
        self.point("test", leaves=False)
        self.doze(2e-5, DOZE_S)
        task.tested_at = task.process.news

    def point(self, name: str, leaves: bool = True) -> None:
        """Come to a scheduling point of the running task. It may be killed or stopped here, or others may go on.

        Args:
            name: of the point.
            leaves: whether others may go on here; if not, the caller waits right afterwards.
        """
        task = self.current
        if task is None:
            return
        self.points += 1
        process = task.process
        process.points += 1
        self.now += _POINT_S
        self.note(f"{process.name[0]}{process.rank}.{task.number} {name}")
        if self.at_point is not None:
            self.at_point(task, name)
            if not process.is_alive:
                self._leave()
        if process.stopped_until > self.now:
            self._ready.append(task)
            self._leave()
        if not leaves or (self._stays and self.random.random() < self._stays):
            return
        self._ready.append(task)
        self._leave()

    def _leave(self) -> None:
        self._hub.switch()

    # Processes

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does. If it is that of the running task, the next scheduling point never returns."""
        if process.is_alive:
            process.is_alive = False
            self.note(f"{process.name} {process.rank} dies")
            self._ready = [task for task in self._ready if task.process is not process]
            for call in process.at_death:
                call()

    def exit(self, process: Process) -> None:
        self.kill(process)
        self._leave()

    def stop(self, process: Process, seconds: float) -> None:
        self.note(f"{process.name} {process.rank} is stopped for {seconds:.3g} s")
        process.stopped_until = self.now + seconds

    def forget(self) -> None:
        """Drop all timers and ready tasks, after the end of a launch."""
        self._timers, self._ready = [], []

    def run(self, is_over: Callable[[], bool], max_s: float = NEVER) -> str:
        """Run tasks until something is over; the result is "" or why it will never be."""
        end = min(self.max_s, self.now + max_s)
        while not is_over():
            if self.points > self.max_points:
                return "too many scheduling points"
            self._fire()
            if self._ready:
                self._switch_to(self._choose())
            elif not self._timers:
                return "all tasks wait for each other"
            elif self._timers[0][0] > end:
                return "too late"
            else:
                self.now = max(self.now, self._timers[0][0])
        return ""

    def _fire(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            _, _, task, action = heapq.heappop(self._timers)
            if task is None:
                action()
            elif task.wakes == action and task.process.is_alive and not task.done:
                task.wakes += 1
                task.due, task.timed_out = None, True
                self._ready.append(task)

    def _choose(self) -> Task:
        ready, number = self._ready, 0
        if len(ready) > 1 and self._has_priorities:
            number = max(range(len(ready)), key=lambda i: ready[i].priority)
            if self.random.random() < 0.002:
                ready[number].priority = -self.random.random()
        elif len(ready) > 1:
            number = self.random.randrange(len(ready))
        return ready.pop(number)

    def _switch_to(self, task: Task) -> None:
        process = task.process
        if process.stopped_until > self.now:
            self._push(process.stopped_until, task, task.wakes)
            return
        if process is not self._loaded:
            self._swap(process)
        self.current = task
        task.glet.switch()
        self.current = None

    def _swap(self, process: Process) -> None:
        """Give each process its own values of the module variables that are in `Process.globals`."""
        if self._loaded is not None:
            for module, name in self._loaded.globals:
                self._loaded.globals[module, name] = getattr(module, name)
        for (module, name), value in process.globals.items():
            setattr(module, name, value)
        self._loaded = process
