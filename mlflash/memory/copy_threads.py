"""Several threads for one rank's copies and checks, if one thread cannot use the whole bandwidth of the memory.

If ranks compete for cores, more threads only get in each other's way. So all ranks measure it at the same time, as they
will copy at the same time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

_MOST = 8
_PIECE_NBYTES, _PIECES, _TRIES = 4 << 20, 8, 5
_WORTH = 1.15  # more threads must be this many times as fast


class CopyThreads:
    """Threads that do pieces of work together with the thread that asks them to, which is one of ``threads``."""

    def __init__(self, threads: int):
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, works: Sequence[Callable[[], object]]) -> None:
        """Do all pieces of work, in any order. Raises what one of them raised; then none is being done any more."""
        if self.threads == 1 or len(works) < 2:
            for work in works:
                work()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, "mlflash-copy")
        remaining = collections.deque(works)

        def some() -> None:
            while True:
                try:
                    work = remaining.popleft()
                except IndexError:
                    return
                work()

        helping: list[Future[None]] = []
        try:
            for _ in range(min(self.threads, len(works)) - 1):  # may raise if no thread can start; others may work then
                helping.append(self._pool.submit(some))
            some()
        finally:
            remaining.clear()
            wait(helping)
        for helper in helping:
            helper.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


ALONE = CopyThreads(1)


def as_many_as_help(ranks: int, least_of: Callable[[list[int]], list[int]],
                    cores: frozenset[int] = frozenset()) -> CopyThreads:  # fmt: skip
    """Make as many threads as make copies faster, which is measured. Collective over the world.

    Args:
        ranks: number of ranks that share this rank's cores.
        cores: where copies will be made; empty: where this thread runs.
    """
    with _on(cores):
        return CopyThreads(_measured(ranks, least_of))


@contextlib.contextmanager
def _on(cores: frozenset[int]) -> Iterator[None]:
    """Run on some cores, with the threads that are started meanwhile, if that is allowed."""
    own = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        if cores:
            os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if cores:
                os.sched_setaffinity(0, own)


def _measured(ranks: int, least_of: Callable[[list[int]], list[int]]) -> int:
    most = min(_MOST, len(os.sched_getaffinity(0)) // ranks)
    best, best_s = 1, 0.0
    tensors: list[np.ndarray] = []
    for number in (1, 2, 4, 8):
        worth_a_try = number <= most and (number == 1 or best == number // 2)
        if least_of([-int(worth_a_try and most > 1)])[0] == 0:  # no rank would use it
            break
        if worth_a_try and not tensors:  # only once: filling new memory takes longer than copying it
            tensors = [np.ones((_PIECES, _PIECE_NBYTES), dtype=np.uint8) for _ in range(2)]
        seconds = _copy_s(number, *tensors) if worth_a_try else 0.0
        if worth_a_try and (number == 1 or seconds * _WORTH < best_s):
            best, best_s = number, seconds
    return best


def _copy_s(threads: int, source: np.ndarray, target: np.ndarray) -> float:
    """Median of the seconds that so many threads take to copy a few large tensors."""
    copy_threads = CopyThreads(threads)
    works = [functools.partial(np.copyto, target[i], source[i]) for i in range(_PIECES)]
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        copy_threads.run(works)
        seconds.append(time.perf_counter() - start)
    copy_threads.close()
    return sorted(seconds)[_TRIES // 2]
