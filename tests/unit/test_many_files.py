"""Very many files are asked for on several threads, and what goes wrong with one is told."""

from __future__ import annotations

import threading

import pytest
from waiting import PATIENCE_S

from mlflash.storage.store import THREADS, each


def test_as_many_go_on_at_a_time_as_there_are_threads() -> None:
    together = threading.Barrier(THREADS)
    names = set(each(lambda _: (together.wait(PATIENCE_S), threading.current_thread().name)[1], range(THREADS * 8)))
    assert names == {"mlflash-files", threading.current_thread().name}


def test_the_first_error_is_raised_and_nothing_is_begun_after_it() -> None:
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 5:
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        each(work, range(15))
    assert begun == [0, 1, 2, 3, 4, 5]
    begun.clear()
    with pytest.raises(OSError, match="no such file"):
        each(work, range(100_000))
    assert len(begun) < 100_000
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflash-files"]
