"""Finds out who is missing: when a wait takes long, ranks ask each other how far they are and what they do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .nonblocking import Operation

_PING, _PONG, _FAILED = 1, 2, 3
_TOLD = 1000  # the most characters of the reason why a rank failed, or of what it does
_WAIT_S = 2.0
ASK_ALL = 256  # in larger worlds rank 0 asks the first rank of each node, and that rank asks the others there


class RankFailed(Exception):
    """Another rank has failed in the middle of a job and has stopped working."""

    def __init__(self, rank: int, job: int, text: str):
        super().__init__(text)
        self.rank, self.job = rank, job


class Pings:
    """Asks and answers on a communicator of its own.

    Args:
        progress: returns how far this rank is: the number of its current job.
        doing: returns what its trainer does just now; "" if nobody needs to know.

    Attributes:
        failed: a rank that has stopped working; None if there is none.
    """

    def __init__(self, mpi: Any, comm: Any, progress: Callable[[], int], doing: Callable[[], str]):
        self._mpi, self._comm, self._progress, self._doing = mpi, comm, progress, doing
        self._asked = 0  # how often this rank asked
        self._told: dict[
            int, tuple[int, int]
        ] = {}  # the last answer of each rank: to which question, and how far the rank is
        self._does: dict[int, str] = {}  # what each rank did then
        self._kept: deque[Any] = deque()  # buffers of messages that are being sent
        self.failed: RankFailed | None = None

    def answer(self) -> None:
        """Answer questions of other ranks, and read their answers."""
        status, numbers = self._mpi.Status(), np.empty(1, dtype=np.int64)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PING, status):
            self._comm.Recv(numbers, status.Get_source(), _PING)
            answer = f"{int(numbers[0])} {self._progress()} {self._doing()[:_TOLD]}"
            self._send(np.frombuffer(answer.encode(), dtype=np.uint8), status.Get_source(), _PONG)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PONG, status):
            question, far, does = self._receive(status, _PONG).split(" ", 2)
            self._told[status.Get_source()], self._does[status.Get_source()] = (int(question), int(far)), does
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _FAILED, status):
            number, text = self._receive(status, _FAILED).split(" ", 1)
            self.failed = RankFailed(status.Get_source(), int(number), text)

    def doing(self, rank: int) -> str | None:
        """What a rank does, by its answer to the last question; None if it has not answered."""
        return self._does[rank] if self._told.get(rank, (0, 0))[0] == self._asked else None

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

    def _receive(self, status: Any, tag: int) -> str:
        told = np.empty(status.Get_count(), dtype=np.uint8)
        self._comm.Recv(told, status.Get_source(), tag)
        return told.tobytes().decode(errors="replace")

    def _send(self, message: np.ndarray, to: int, tag: int) -> None:
        self._kept.append((message, self._comm.Isend(message, to, tag)))
        while self._kept and self._kept[0][1].Test():
            self._kept.popleft()
