"""How the courier waits: every wait ends, whatever MPI does.

Every wait is a loop: test, push MPI's progress, sleep a little. A deadline never cancels an MPI operation, because that
is impossible. It tells `on_late` which ranks were waited for, and the loop goes on, so that a slow peer can catch up.
Long before that, a rank that restores logs whom it waits for (`Waits.doing`).
If MPI has only a blocking call for something, the courier makes this call when all ranks have reached it
(`Waits.together`). If a rank is stopped right there, another thread reports the deadline (`Waits.tell_if_held`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import DeadlineExceeded
from ..events import Event
from ..text import listed
from . import nonblocking
from .nonblocking import Agreement, Operation

log = logging.getLogger("mlflash")

_NAMED = 8  # ranks named in a text
_FIRST_ASK_S = 10.0  # until a rank that restores asks who is missing (or a quarter of its deadline); then twice that


class Abandoned(BaseException):
    """An exception left the Checkpointer: the courier drops what it is doing."""


class Waits(Agreement):
    """The waits of one rank, with the deadline of its current job; `World` is made of it."""

    local_rank: int
    mpi: Any

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        # of the job, by `time.monotonic`; infinite if there is none, or after it was reported
        self.deadline = float("inf")
        self.on_late: Callable[[DeadlineExceeded], None] = lambda error: None
        self.waiting_for: Sequence[int] = ()
        self.inside = "MPI"  # name of the MPI call that this rank is in
        self.job_number = 0
        # what the trainer of this rank does in a restore, such as "restoring"; "": it is in none. In a restore this
        # rank logs for whom it waits
        self.doing = ""
        self.waited_s = 0.0  # seconds that this rank has waited so far, for other ranks, its trainer or MPI
        self.abandoned = Event()  # set when the courier must drop what it is doing
        self.poke: Callable[[], None] = lambda: None  # pushes MPI's progress
        self.run_background: Callable[[], None] = lambda: None  # advances work outside of the jobs
        self.pings: Pings | None = None
        self._clock = threading.Lock()  # held by the thread that reports a deadline
        self._naps = 0
        self._pings_answered_s = 0.0
        self._job_began = self._ask_after_s = 0.0
        self._asking: Operation | None = None  # who is missing, before the deadline
        self._missing: Sequence[int] = ()  # the answer

    # Deadlines

    def start_job(self, on_late: Callable[[DeadlineExceeded], None]) -> None:
        self.job_number += 1
        self.on_late = on_late
        self._job_began, self._asking, self._missing = time.monotonic(), None, ()
        self._ask_after_s = min(_FIRST_ASK_S, self.timeout_s / 4)
        self.deadline = self._job_began + self.timeout_s

    def end_job(self) -> None:
        """End a job. From now on nobody is told that it is late."""
        with self._clock:
            self.deadline = float("inf")

    def tell_if_held(self, grace_s: float) -> None:
        """Report, from another thread, a deadline that passed ``grace_s`` ago while the courier did not `pause`."""
        with self._clock:
            if time.monotonic() > self.deadline + grace_s:
                self.deadline = float("inf")
                self.on_late(self._held())

    def _take_deadline(self) -> bool:
        """Whether the caller must report the deadline."""
        with self._clock:
            passed = time.monotonic() > self.deadline
            self.deadline = float("inf") if passed else self.deadline
        return passed

    # Waiting

    def pause(self) -> None:
        """Spend a moment in a wait: push all progress, answer pings, check the deadline, sleep.

        Raises:
            Abandoned: an exception left the Checkpointer.
            RankFailed: another rank no longer takes part in this job.
        """
        if self.abandoned.is_set():
            raise Abandoned
        now = time.monotonic()
        self.poke()
        self.run_background()
        if now - self._pings_answered_s > 0.02:
            self.answer_pings()
            self._pings_answered_s = now
            failed = None if self.pings is None else self.pings.failed
            if failed is not None and failed.job <= self.job_number:
                raise failed
        if self.doing and self.pings is not None:
            self._ask_who_is_missing(self.pings, now - self._job_began)
        if now > self.deadline and self._take_deadline():
            # A rank that comes just now was waited for, too.
            self.on_late(self._late(self._who_is_missing() or self._missing))
        # Spin a little, then sleep up to 1 ms: with more ranks than cores a spinning rank starves the others.
        self._naps += 1
        if self._naps > 8:
            time.sleep(min(1e-3, 2e-5 * (self._naps - 8)))
        self.waited_s += time.monotonic() - now

    def finish(self, *requests: Any) -> None:
        for request in requests:
            self._naps = 0
            while not request.Test():
                self.pause()

    def wait_for(self, done: Callable[[], bool]) -> None:
        self._naps = 0
        while not done():
            self.pause()

    def drive(self, operations: Iterable[Operation]) -> list[Any]:
        """Run step-by-step operations side by side until all have ended; return their results in order."""
        running = nonblocking.side_by_side(operations)
        self._naps = 0
        while True:
            try:
                moved = next(running)
            except StopIteration as end:
                results: list[Any] = end.value
                return results
            if moved:
                self._naps = 0
            else:
                self.pause()

    # Calls of MPI that block

    @contextlib.contextmanager
    def together(self, call: str, comm: Any) -> Iterator[None]:
        """Enter a blocking MPI call when all ranks have reached it; for a ``with`` block. Collective over comm."""
        self.meet(comm)
        with self.within(call):
            yield

    def meet(self, comm: Any) -> None:
        """Wait until all ranks are here and each rank knows it. Collective over comm.

        If a rank gives up at the first barrier, it never reaches the second, so no rank goes on without it.
        """
        self.finish(comm.Ibarrier())
        self.finish(comm.Ibarrier())

    @contextlib.contextmanager
    def within(self, call: str) -> Iterator[None]:
        """Name the call of MPI that this rank is in; for a ``with`` block."""
        self.inside = call
        try:
            yield
        finally:
            self.inside = "MPI"

    # Who is missing: asked when a deadline has passed, and before in a restore

    def answer_pings(self) -> None:
        """Answer ranks that ask whether this one is alive, with the number of its current job."""
        if self.pings is not None:
            self.pings.answer()

    def tell_failed(self, text: str) -> None:
        if self.pings is not None:
            self.pings.tell_failed(text)

    def silent(self) -> Operation:
        """Ask all ranks; the result is the ranks that do not answer."""
        return [] if self.pings is None else (yield from self.pings.ask(self._others()))

    def _ask_who_is_missing(self, pings: Pings, seconds: float) -> None:
        """Ask who is missing if this job takes long, and log it. It does not wait: each call does a part of it."""
        if self._asking is None and seconds > self._ask_after_s:
            self._ask_after_s *= 2
            self._asking = pings.ask(self.waiting_for or self._others(), self.job_number)
        if self._asking is not None:
            try:
                next(self._asking)
            except StopIteration as end:
                self._asking, self._missing = None, end.value
                self._log_missing(end.value, seconds)

    def _who_is_missing(self) -> Sequence[int]:
        """Ask the ranks waited for. Missing are those that do not answer or have not reached this rank's job."""
        if self.pings is None:
            return ()
        asking = self.pings.ask(self.waiting_for or self._others(), self.job_number)
        while not self.abandoned.is_set():
            try:
                next(asking)
            except StopIteration as end:
                missing: Sequence[int] = end.value
                return missing
            self.poke()
            time.sleep(1e-3)
        return ()

    # Errors about waits that are too long

    def names_of(self, ranks: Sequence[int]) -> str:
        nodes = self.topology.node_names
        texts = [f"rank {rank} on {self.topology.name_of(rank)}" if nodes else f"rank {rank}" for rank in ranks]
        return listed(texts, _NAMED)

    def _exceeded(self, what: str, ranks: Sequence[int]) -> DeadlineExceeded:
        nodes = self.topology.node_names
        return DeadlineExceeded(
            f"waited {self.timeout_s:g} s {what}; the last committed step is untouched. All ranks must make each "
            "collective call, including save and restore. A slow rank can still come; if it does not, or if it is "
            "dead, relaunch the job",
            rank=self.rank,
            node=self.node_name if nodes else None,
            ranks=ranks,
            nodes=[self.topology.name_of(rank) for rank in ranks] if nodes else (),
        )

    def _late(self, missing: Sequence[int]) -> DeadlineExceeded:
        whom = self.names_of(missing) or "the other ranks"
        if self.pings is None and self.mpi is not None:
            whom = f"all {self.size} ranks to come to Checkpointer()"
        return self._exceeded(f"for {whom}", missing)

    def _held(self) -> DeadlineExceeded:
        where = f"inside of {self.inside}, which returns when all ranks have called it" if self.mpi else "at work"
        return self._exceeded(f"and the courier of this rank is still {where}", self.waiting_for)

    def _log_missing(self, missing: Sequence[int], seconds: float) -> None:
        if not missing or (self.size <= ASK_ALL and missing[: self.rank] != [*range(self.rank)]):
            return  # a lower rank logs it
        texts = [f"{self.names_of([rank])} ({self._doing_of(rank)})" for rank in missing]
        log.warning("this restore is waiting for %s, for %.0f s so far", listed(texts, _NAMED), seconds)

    def _doing_of(self, rank: int) -> str:
        doing = None if self.pings is None else self.pings.doing(rank)
        return "no answer" if doing is None else doing or "not restoring"

    def _others(self) -> Sequence[int]:
        """The ranks to ask if it is unknown which rank is waited for."""
        if self.size <= ASK_ALL:
            return [rank for rank in range(self.size) if rank != self.rank]
        first_ranks = [ranks[0] for ranks in self.topology.ranks_on]
        asked = {*self.topology.ranks_on[self.node_index]} if self.local_rank == 0 else set()
        asked |= {*first_ranks} if self.rank == 0 else {0} if self.rank in first_ranks[1:2] else set()
        return sorted(asked - {self.rank})


# Who is missing: when a wait takes long, ranks ask each other how far they are and what they do


_PING, _PONG, _FAILED = 1, 2, 3
_MOST_LETTERS = 1000  # the most characters of the reason why a rank failed, or of what it does
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
    """

    def __init__(self, mpi: Any, comm: Any, progress: Callable[[], int], doing: Callable[[], str]):
        self._mpi, self._comm, self._progress, self._doing = mpi, comm, progress, doing
        self._questions = 0  # how often this rank asked
        # the last answer of each rank: to which question, and how far the rank is
        self._answers: dict[int, tuple[int, int]] = {}
        self._doings: dict[int, str] = {}  # what each rank did then
        self._being_sent: deque[Any] = deque()  # buffers of messages that are being sent
        self.failed: RankFailed | None = None  # a rank that has stopped working; None if there is none

    def answer(self) -> None:
        status, numbers = self._mpi.Status(), np.empty(1, dtype=np.int64)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PING, status):
            self._comm.Recv(numbers, status.Get_source(), _PING)
            answer = f"{int(numbers[0])} {self._progress()} {self._doing()[:_MOST_LETTERS]}"
            self._send(np.frombuffer(answer.encode(), dtype=np.uint8), status.Get_source(), _PONG)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _PONG, status):
            question, far, does = self._receive(status, _PONG).split(" ", 2)
            self._answers[status.Get_source()], self._doings[status.Get_source()] = (int(question), int(far)), does
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _FAILED, status):
            number, text = self._receive(status, _FAILED).split(" ", 1)
            self.failed = RankFailed(status.Get_source(), int(number), text)

    def doing(self, rank: int) -> str | None:
        """What a rank does, by its answer to the last question; None if it has not answered."""
        return self._doings[rank] if self._answers.get(rank, (0, 0))[0] == self._questions else None

    def tell_failed(self, text: str) -> None:
        """Tell all other ranks that this one has stopped working, and why, so that they need not wait for it."""
        message = np.frombuffer(f"{self._progress()} {text[:_MOST_LETTERS]}".encode(), dtype=np.uint8)
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._send(message, rank, _FAILED)

    def ask(self, ranks: Sequence[int], least: int = 0) -> Operation:
        """Ask ranks. The result is the ranks that do not answer or have not reached job ``least``, ascending."""
        self._questions += 1
        number = self._questions
        for rank in ranks:
            self._send(np.array([number], dtype=np.int64), rank, _PING)
        behind, end = set(ranks), time.monotonic() + _WAIT_S
        while behind and time.monotonic() < end:
            yield False
            self.answer()
            answers = {rank: self._answers.get(rank, (0, 0)) for rank in behind}
            behind = {rank for rank, (question, far) in answers.items() if question < number or far < least}
        return sorted(behind)

    def _receive(self, status: Any, tag: int) -> str:
        message = np.empty(status.Get_count(), dtype=np.uint8)
        self._comm.Recv(message, status.Get_source(), tag)
        return message.tobytes().decode(errors="replace")

    def _send(self, message: np.ndarray, to: int, tag: int) -> None:
        self._being_sent.append((message, self._comm.Isend(message, to, tag)))
        while self._being_sent and self._being_sent[0][1].Test():
            self._being_sent.popleft()
