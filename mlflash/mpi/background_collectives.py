"""Collectives for work outside of the courier's jobs, step by step, on communicators of their own.

A drain takes as long as the file system does, and ranks end its parts in any order, while saves go on. So it neither
posts jobs nor waits in one: the courier advances it a little whenever it has nothing else to do (`Operation`).
"""

from __future__ import annotations

import pickle
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import MlflashError, text_of
from . import nonblocking
from .nonblocking import Operation, done
from .world import World

_TURN = 1
_BEAT_S = 1.0


class BackgroundCollectives:
    """Communicators like the world's. Collective over the world, and so is each method, which all ranks must run."""

    def __init__(self, world: World):
        self._world, self._mpi = world, world.mpi
        self._comm, self._beat = world.duplicate(world.world), world.duplicate(world.world)

    def least_of(self, values: np.ndarray) -> Operation:
        return nonblocking.least_of(self._mpi, self._comm, values)

    def gather(self, value: Any) -> Operation:
        return nonblocking.gather(self._mpi, self._comm, value)

    def broadcast(self, value: Any, root: int = 0) -> Operation:
        return nonblocking.broadcast(self._comm, value, root)

    def raise_together(self, error: MlflashError | None) -> Operation:
        return nonblocking.raise_together(self._mpi, self._comm, error)

    def beat(self, progress: Callable[[], int], ended: Callable[[], bool], moved: Callable[[], None],
             silent: Callable[[Sequence[int]], None]) -> Operation:  # fmt: skip
        """Tell every rank about once a second whether any rank has made progress, until all have ended.

        Args:
            progress: how far this rank is: a number that grows.
            ended: whether this rank has ended.
            moved: called when some rank has made progress.
            silent: called with the ranks that do not answer, after a quarter of a deadline without an answer.
        """
        known, all_ended = -1, False
        while not all_ended:
            own = np.array([progress(), int(ended())], dtype=np.int64)
            total = own if self._beat is None else np.empty_like(own)
            if self._beat is not None:
                heard, request = time.monotonic(), self._beat.Iallreduce(own, total, self._mpi.SUM)
                while not request.Test():
                    yield False
                    if time.monotonic() - heard > self._world.timeout_s / 4:
                        silent((yield from self._world.silent()))
                        heard = time.monotonic()
            if total[0] != known:
                known = int(total[0])
                moved()
            all_ended = int(total[1]) == self._world.size
            until = time.monotonic() + _BEAT_S
            while not (all_ended or ended()) and time.monotonic() < until:
                yield False

    def collect(self, value: Any) -> Operation:
        """Give rank 0 the (pickled, compressed) value of every rank; the others get an empty list."""
        if self._comm is None:
            return [value]
        packed = np.frombuffer(zlib.compress(pickle.dumps(value), 1), dtype=np.uint8)
        first = self._comm.rank == 0
        sizes = np.empty(self._comm.size if first else 0, dtype=np.int64)
        yield from done(self._comm.Igather(np.array([packed.nbytes], dtype=np.int64), sizes if first else None))
        out = np.empty(int(sizes.sum()), dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1])) if first else sizes
        yield from done(self._comm.Igatherv(packed, [out, (sizes, starts), self._mpi.BYTE] if first else None))
        return [pickle.loads(zlib.decompress(out[a : a + n].tobytes())) for a, n in zip(starts, sizes, strict=True)]

    def in_turn(self, at_once: int, work: Callable[[], Operation]) -> Operation:
        """Do something that raises nothing, on at most ``at_once`` ranks at a time; 0: on all."""
        rank, size = self._world.rank, self._world.size
        word = np.zeros(1, dtype=np.int64)
        if self._comm is not None and 0 < at_once <= rank:
            yield from done(self._comm.Irecv(word, rank - at_once, _TURN))
        result = yield from work()
        if self._comm is not None and at_once > 0 and rank + at_once < size:
            yield from done(self._comm.Isend(word, rank + at_once, _TURN))
        return result

    def free(self) -> None:
        """Free the communicators. Collective over the world."""
        if self._comm is not None:
            self._world.drop(self._comm, self._beat)
            self._comm = self._beat = None


def in_thread(work: Callable[[], Any], name: str) -> Operation:
    """Do something on a thread of its own, which ends with the process. Return its result, or raise its error."""
    result: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:  # raised where the result is waited for
            errors.append(error)
        except BaseException as error:  # such as PyTorch's CheckpointException: it must not end the waiting thread
            errors.append(RuntimeError(text_of(error)))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while thread.is_alive():
        yield False
    yield True
    if errors:
        raise errors[0]
    return result[0]
