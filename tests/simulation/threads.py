"""What stands for the modules threading, queue and time in simulated processes. Every wait is a wait of the scheduler.

`SCHEDULER` is that of the history that runs; outside of one, time is real.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from scheduler import DOZE_S, NEVER, POLL_S, Scheduler, Task

SCHEDULER: Scheduler | None = None
_EPOCH_S = 1_700_000_000.0
_START_S = 1000.0


def scheduler() -> Scheduler:
    assert SCHEDULER is not None
    return SCHEDULER


class _Waiters:
    """Tasks that wait for something, in their order."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()

    def wait(self, until: float, timeout: float | None) -> None:
        """Wait until woken or until a time; a short timeout is that of a poll."""
        kernel = scheduler()
        self._tasks.append(task := kernel.current)
        is_poll = timeout is not None and timeout <= 4 * POLL_S
        kernel.doze(until - kernel.now, 4 * DOZE_S) if is_poll else kernel.block(until)
        if task in self._tasks:  # something else has woken it, or its time is over
            self._tasks.remove(task)

    def wake(self, number: int | None = None) -> None:
        for _ in range(len(self._tasks) if number is None else min(number, len(self._tasks))):
            scheduler().wake(self._tasks.popleft())


def _until(timeout: float | None) -> float:
    return NEVER if timeout is None or timeout < 0 else scheduler().now + timeout


class Event:
    def __init__(self) -> None:
        self._is_set, self._waiters = False, _Waiters()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if SCHEDULER is not None:
            self._waiters.wake()
            SCHEDULER.tell_news()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel = scheduler()
        kernel.point("event.wait")
        until = _until(None if timeout is None else max(0.0, timeout))
        while not self._is_set and kernel.now < until and kernel.current is not None:
            self._waiters.wait(until, timeout)
        return self._is_set


class Lock:
    _is_reentrant = False

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._count, self._waiters = 0, _Waiters()

    def locked(self) -> bool:
        return self._count > 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = None if SCHEDULER is None else SCHEDULER.current
        if self._count and not (self._is_reentrant and self._owner is me):
            until = _until(timeout)
            while self._count:
                if not blocking or scheduler().now >= until:
                    return False
                self._waiters.wait(until, None)
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if not self._count:
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._waiters.wake(1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    _is_reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock, self._waiters = lock or RLock(), _Waiters()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def wait(self, timeout: float | None = None) -> None:
        count = self._lock._count
        for _ in range(count):
            self._lock.release()
        self._waiters.wait(_until(timeout), None)
        for _ in range(count):
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = _until(timeout)
        while not (result := predicate()) and scheduler().now < until:
            self.wait(None if timeout is None else until - scheduler().now)
        return result

    def notify_all(self) -> None:
        self._waiters.wake()
        scheduler().tell_news()


class Queue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters = _Waiters()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if SCHEDULER is not None:
            self._waiters.wake(1)
            SCHEDULER.tell_news()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        kernel = scheduler()
        kernel.point("queue.get")
        until = _until(timeout)
        while not self._items:
            if not block or kernel.now >= until:
                raise queue.Empty
            self._waiters.wait(until, timeout)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Thread:
    def __init__(self, target: Callable[..., object] | None = None, name: str = "", args: tuple[Any, ...] = (),
                 daemon: bool | None = None):  # fmt: skip
        self._target, self.name, self._args, self.daemon = target, name, args, daemon
        self._task: Task | None = None

    @classmethod
    def of(cls, task: Task) -> Thread:
        """The object that stands for a task."""
        if task.thread is None:
            task.thread = cls(name=task.name)
            task.thread._task = task
        return task.thread

    def start(self) -> None:
        kernel = scheduler()
        assert kernel.current is not None and self._target is not None
        run = self._target
        self._task = kernel.spawn(kernel.current.process, self.name, lambda: run(*self._args))
        self._task.thread = self
        kernel.point("thread.start")

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        kernel = scheduler()
        kernel.point("thread.join")
        until = _until(timeout)
        while self.is_alive() and kernel.now < until:
            assert self._task is not None and kernel.current is not None
            self._task.joiners.append(kernel.current)
            if not kernel.block(until):
                self._task.joiners.remove(kernel.current)


class Threading:
    Event, Lock, RLock, Condition, Thread = Event, Lock, RLock, Condition, Thread

    @staticmethod
    def current_thread() -> Any:
        is_simulated = SCHEDULER is not None and SCHEDULER.current is not None
        return Thread.of(SCHEDULER.current) if is_simulated else threading.main_thread()

    @staticmethod
    def get_ident() -> int:
        return 0 if SCHEDULER is None or SCHEDULER.current is None else SCHEDULER.current.number

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Queues:
    Queue = SimpleQueue = Queue
    Empty = queue.Empty


REAL_TIME = {name: getattr(time, name) for name in
             ("monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns", "time", "time_ns", "sleep")}  # fmt: skip


def replace_time() -> None:
    """Replace the functions of the module time itself, before mlflash is imported: some are defaults of dataclasses."""
    for name, start_s in (("monotonic", _START_S), ("perf_counter", _START_S), ("time", _EPOCH_S)):
        setattr(time, name, _clock(start_s, REAL_TIME[name], lambda seconds: seconds))
        setattr(time, f"{name}_ns", _clock(start_s, REAL_TIME[f"{name}_ns"], lambda seconds: int(seconds * 1e9)))
    time.sleep = lambda seconds: REAL_TIME["sleep"](seconds) if SCHEDULER is None else SCHEDULER.sleep(seconds)


def _clock(start_s: float, real: Callable[[], Any], scale: Callable[[float], Any]) -> Callable[[], Any]:
    return lambda: real() if SCHEDULER is None else scale(start_s + SCHEDULER.now)
