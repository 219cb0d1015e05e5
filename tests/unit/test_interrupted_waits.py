"""An exception at any moment of a wait, as of a signal handler: nothing stays locked, and nobody is forgotten."""

from __future__ import annotations

import itertools
import queue
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from interruption import interrupted
from waiting import PATIENCE_S, until

import mlflash
from mlflash.events import Event, News, Queue

T = TypeVar("T")

_SOON_S = 0.001  # of a wait that is meant to pass
_HOME = Path(mlflash.__file__).parent
# The courier's process runs no code of a user, hence no signal handler either.
_WITHOUT_HANDLERS = {"courier/hosted_session.py", "events.py"}


def test_who_waits_is_woken_and_a_late_one_is_not_kept_waiting() -> None:
    event, woken = Event(), []
    assert not event.wait(_SOON_S) and not event.is_set()
    threads = [threading.Thread(target=lambda: woken.append(event.wait(PATIENCE_S)), daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: len(event._waiting) == 5, "all wait")
    start = time.monotonic()
    event.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert woken == [True] * 5 and event.wait() and time.monotonic() - start < PATIENCE_S
    event.clear()
    assert not event.wait(0)


def test_whoever_waits_for_a_condition_sees_it_hold() -> None:
    news, seen, number = News(), [], [0]
    thread = threading.Thread(
        target=lambda: seen.append(news.wait_for(lambda: number[0] >= 3, PATIENCE_S)), daemon=True
    )
    thread.start()
    for _ in range(3):
        number[0] += 1
        news.tell()
    thread.join(PATIENCE_S)
    assert seen == [True] and not news.wait_for(lambda: False, _SOON_S)


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


def test_a_queue_gives_items_in_order_and_its_wait_ends() -> None:
    numbers: Queue[int] = Queue()
    assert numbers.empty()
    for timeout in (-1.0, 0.0, _SOON_S):
        with pytest.raises(queue.Empty):
            numbers.get(timeout)
    giving = threading.Thread(target=lambda: [numbers.put(one) for one in range(1000)], daemon=True)
    giving.start()
    assert [numbers.get(PATIENCE_S) for _ in range(1000)] == [*range(1000)]
    giving.join(PATIENCE_S)
    assert numbers.empty()


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


def test_nothing_of_the_trainer_waits_with_a_lock_that_python_code_takes() -> None:
    found = {}
    for path in sorted(_HOME.rglob("*.py")):
        name = path.relative_to(_HOME).as_posix()
        text = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL)
        uses = re.findall(r"threading\.(?:Event|Condition|Semaphore|BoundedSemaphore|Barrier)\b", text)
        uses += re.findall(r"queue\.(?:Lifo|Priority)?Queue\b", text)
        uses += re.findall(r"\.get\(timeout=.*", text) if "SimpleQueue" in text else []  # it can wait for ever
        if uses and name not in _WITHOUT_HANDLERS:
            found[name] = uses
    assert found == {}, "use mlflash.events, queue.SimpleQueue without timeout, or a plain lock in a with"
