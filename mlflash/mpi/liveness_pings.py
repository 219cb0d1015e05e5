"""Finds out who is missing: when a deadline has passed, ranks ask each other how far they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .nonblocking import Operation

_PING, _PONG, _FAILED = 1, 2, 3
_TOLD = 1000  # the most characters of the reason why a rank failed
_WAIT_S = 2.0
ASK_ALL = 256  # in larger worlds only rank 0 asks, and only the first rank of each node


class RankFailed(Exception):
    """Another rank has failed in the middle of a job and has stopped working."""

    def __init__(self, rank: int, job: int, text: str):
        super().__init__(text)
        self.rank, self.job = rank, job


class Pings:
    """Asks and answers on a communicator of its own. Not collective.

    Args:
        mpi: the module mpi4py.MPI.
        comm: the communicator.
        progress: returns how far this rank is: the number of its current job.

    Attributes:
        failed: a rank that has stopped working; None if there is none.
    """

    def __init__(self, mpi: Any, comm: Any, progress: Callable[[], int]):
        self._mpi, self._comm, self._progress = mpi, comm, progress
        self._asked = 0  # how often this rank asked
        self._told: dict[
            int, tuple[int, int]
        ] = {}  # the last answer of each rank: to which question, and how far the rank is
        self._kept: deque[Any] = deque()  # buffers of messages that are being sent
        self.failed: RankFailed | None = None

    def answer(self) -> None:
        """Answer questions of other ranks, and read their answers."""
        status, numbers = self._mpi.Status(), np.empty(2, dtype=np.int64)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PING, status):
            self._comm.Recv(numbers[:1], status.Get_source(), _PING)
            self._send(np.array([numbers[0], self._progress()], dtype=np.int64), status.Get_source(), _PONG)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PONG, status):
            self._comm.Recv(numbers, status.Get_source(), _PONG)
            self._told[status.Get_source()] = int(numbers[0]), int(numbers[1])
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _FAILED, status):
            told = np.empty(status.Get_count(), dtype=np.uint8)
            self._comm.Recv(told, status.Get_source(), _FAILED)
            number, text = told.tobytes().split(b" ", 1)
            self.failed = RankFailed(status.Get_source(), int(number), text.decode(errors="replace"))

    def tell_failed(self, text: str) -> None:
        """Tell all other ranks that this one has stopped working, and why, so that they need not wait for it."""
        told = np.frombuffer(f"{self._progress()} {text[:_TOLD]}".encode(), dtype=np.uint8)
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._send(told, rank, _FAILED)

    def ask(self, ranks: Sequence[int], least: int = 0) -> Operation:
        """Ask ranks. The result is the ranks that do not answer or have not reached job ``least``, ascending."""
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
