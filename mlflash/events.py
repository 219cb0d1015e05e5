"""Events and queues to wait for: an exception in the middle of a call leaves nothing locked, and each wait ends.

`threading.Event` waits with a lock held that Python code takes and releases: if a signal handler raises an exception
there, which many programs' handlers do, the lock stays taken, and each later call hangs for ever. Here each wait has a
lock of its own, which only C code takes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_CHECK_S = 1.0  # after which a wait looks again: whoever should have woken it may have been interrupted


class Event:
    """A flag that is set once or cleared, like `threading.Event`. Any thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            try:
                waiting = self._waiting.pop()
            except IndexError:  # another thread was faster
                break
            waiting.release()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most so many seconds; None: for ever. Return whether it is set."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            remaining_s = _CHECK_S if end is None else end - time.monotonic()
            if remaining_s <= 0:
                break
            woken = threading.Lock()
            woken.acquire()
            self._waiting.append(woken)
            if not self._is_set:  # otherwise who set it may not have seen this lock
                woken.acquire(timeout=min(remaining_s, _CHECK_S))
            try:
                self._waiting.remove(woken)
            except ValueError:  # it was woken
                pass
        return self._is_set


class News:
    """Wakes those who wait for some condition, like `threading.Condition` without its lock. Any thread."""

    def __init__(self) -> None:
        self._next = Event()

    def tell(self) -> None:
        """Let all who wait look again."""
        event, self._next = self._next, Event()
        event.set()

    def wait_for(self, holds: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until a condition holds, for at most so many seconds; return what it returned last."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            news = self._next
            if result := holds():
                return result
            remaining_s = None if end is None else end - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return result
            news.wait(remaining_s)


class Queue(Generic[T]):
    """What any thread puts in, one thread takes out, in order, like `queue.SimpleQueue`.

    ``SimpleQueue.get(timeout=...)`` of CPython up to 3.12 can wait for ever: it subtracts the time that has passed from
    its timeout, and a negative rest, of a thread that was not running meanwhile, means no limit.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._filled.set()

    def get(self, timeout: float) -> T:
        """Take the oldest item, waiting for at most so many seconds; raises `queue.Empty`."""
        end = time.monotonic() + timeout
        while True:
            self._filled.clear()
            if self._items:
                return self._items.popleft()
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                raise queue.Empty
            self._filled.wait(min(remaining_s, _CHECK_S))

    def empty(self) -> bool:
        return not self._items
