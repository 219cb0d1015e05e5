"""Threads that copy and check together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from waiting import take

from mlflash.memory.copy_threads import CopyThreads, as_many_as_help


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_work_is_done_once_and_is_done_when_run_returns(threads: int) -> None:
    counts = [0] * 300
    who = set()
    together = threading.Barrier(threads)  # the first works last until all threads are at work

    def work(number: int) -> Callable[[], None]:
        def do() -> None:
            who.add(threading.get_ident())
            if number < threads:
                together.wait(60)
            counts[number] += 1

        return do

    one = CopyThreads(threads)
    for times in (1, 2):
        one.run([work(number) for number in range(300)])
        assert counts == [times] * 300
    one.run([])
    one.close()
    one.close()
    assert len(who) == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_what_goes_wrong_is_raised_when_nobody_is_at_work_any_more(threads: int) -> None:
    running = []
    together = threading.Barrier(threads)  # whichever thread fails, all others are at work then

    def good() -> None:
        running.append(1)
        together.wait(60)
        take(0.01 if threading.current_thread() is threading.main_thread() else 0.05)
        running.pop()

    def bad() -> None:
        together.wait(60)
        raise ValueError("bad")

    one = CopyThreads(threads)
    for number in range(20):
        works = [good] * (threads - 1)
        works.insert(number % threads, bad)
        with pytest.raises(ValueError, match="bad"):
            one.run(works)
        assert not running
    one.run([good] * threads)
    one.close()


def test_measuring_takes_a_moment_and_gives_a_number() -> None:
    assert 1 <= as_many_as_help(1, lambda numbers: numbers).threads <= 8
