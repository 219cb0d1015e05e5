"""Who is missing: ranks ask each other, when a deadline has passed, how far they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .moves import Moves

_PING, _PONG = 1, 2
_WAIT_S = 2.0
ASK_ALL = 256  # in larger worlds only rank 0 asks, and only the first rank of each node


class Pings:
    """Asks and answers on a communicator of its own. Not collective.

    Args:
        mpi: the module mpi4py.MPI.
        comm: the communicator.
        progress: how far this rank is: the number of the job it is in.
    """

    def __init__(self, mpi: Any, comm: Any, progress: Callable[[], int]):
        self._mpi, self._comm, self._progress = mpi, comm, progress
        self._asked = 0  # how often this rank asked
        self._told: dict[
            int, tuple[int, int]
        ] = {}  # of each rank the last answer: to which question, and how far it is
        self._kept: deque[Any] = deque()  # buffers of messages that nobody waits for

    def answer(self) -> None:
        """Answer those who ask, and hear what the others answer."""
        status, numbers = self._mpi.Status(), np.empty(2, dtype=np.int64)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PING, status):
            self._comm.Recv(numbers[:1], status.Get_source(), _PING)
            self._send(np.array([numbers[0], self._progress()], dtype=np.int64), status.Get_source(), _PONG)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PONG, status):
            self._comm.Recv(numbers, status.Get_source(), _PONG)
            self._told[status.Get_source()] = int(numbers[0]), int(numbers[1])

    def ask(self, ranks: Sequence[int], least: int = 0) -> Moves:
        """Ask ranks; the result is those that do not answer, or have not come so far, ascending."""
        self._asked += 1
        mine = self._asked
        for rank in ranks:
            self._send(np.array([mine], dtype=np.int64), rank, _PING)
        behind, end = set(ranks), time.monotonic() + _WAIT_S
        while behind and time.monotonic() < end:
            yield False
            self.answer()
            told = {rank: self._told.get(rank, (0, 0)) for rank in behind}
            behind = {rank for rank, (question, far) in told.items() if question < mine or far < least}
        return sorted(behind)

    def _send(self, message: np.ndarray, to: int, tag: int) -> None:
        self._kept.append((message, self._comm.Isend(message, to, tag)))
        while self._kept and self._kept[0][1].Test():
            self._kept.popleft()
