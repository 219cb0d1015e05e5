"""An exception at any moment of a wait, as of a signal handler: nothing stays locked, and nobody is forgotten."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from interruption import interrupted
from waiting import PATIENCE_S, until

from mlflash.events import Event, News, Queue

T = TypeVar("T")

_SOON_S = 0.001  # of a wait that is meant to pass


def waits(call: Callable[[], T], woken: list[T]) -> threading.Thread:
    thread = threading.Thread(target=lambda: woken.append(call()), daemon=True)
    thread.start()
    return thread


def moments(is_interrupted: Callable[[int], bool]) -> int:
    """Interrupt something at each of its moments, the first one first; return the number after the last one."""
    return next(nth for nth in itertools.count(1) if not is_interrupted(nth))


def is_wait_interrupted(what: str, nth: int) -> bool:
    """Interrupt a wait at its nth moment; then others must be woken. Return whether there was such a moment."""
    event, news = Event(), News()
    calls = {"event": lambda: event.wait(_SOON_S), "news": lambda: news.wait_for(lambda: False, _SOON_S)}
    was = interrupted(calls[what], nth)
    woken: list[bool] = []
    others = [waits(lambda: event.wait(PATIENCE_S), woken),
              waits(lambda: news.wait_for(event.is_set, PATIENCE_S), woken)]  # fmt: skip
    assert not event.wait(0)
    event.set()
    news.tell()
    for other in others:
        other.join(PATIENCE_S)
    assert woken == [True, True], nth
    return was


@pytest.mark.parametrize("what", ["event", "news"])
def test_an_exception_at_any_moment_of_a_wait_leaves_nothing_locked(what: str) -> None:
    assert moments(lambda nth: is_wait_interrupted(what, nth)) > 10


def is_put_interrupted(nth: int) -> bool:
    """Interrupt a put at its nth moment; who posts again is heard. Return whether there was such a moment."""
    items: Queue[str] = Queue()
    taken: list[str] = []
    taker = waits(lambda: items.get(PATIENCE_S), taken)
    until(lambda: len(items._filled._waiting) == 1, "it waits")
    was = interrupted(lambda: items.put("first"), nth)
    items.put("first" if was else "second")
    taker.join(PATIENCE_S)
    assert taken == ["first"], nth
    return was


def test_an_exception_at_any_moment_of_a_put_loses_nothing() -> None:
    assert moments(is_put_interrupted) > 5


def is_set_interrupted(nth: int) -> bool:
    event, woken = Event(), list[bool]()
    other = waits(lambda: event.wait(PATIENCE_S), woken)
    until(lambda: len(event._waiting) == 1, "it waits")
    was = interrupted(event.set, nth)
    event.set()  # who was interrupted before the flag was set calls again
    other.join(PATIENCE_S)
    assert woken == [True], nth
    return was


def test_an_exception_at_any_moment_of_a_set_forgets_nobody_for_long() -> None:
    assert moments(is_set_interrupted) > 3
