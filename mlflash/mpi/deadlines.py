"""How the courier waits: every wait ends, whatever MPI is doing.

Every wait is a loop: test, push MPI's progress, sleep a little. A deadline never cancels an MPI operation (that cannot
be done); it tells `on_late` who was waited for, and the loop goes on, so that a slow peer can catch up. What MPI has
only as a call that blocks is called when all ranks have come to it (`Waits.together`). Should one be stopped right
there, another thread tells of the deadline (`Waits.tell_if_held`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import DeadlineExceeded
from . import nonblocking
from .liveness_pings import Pings
from .nonblocking import Operation


class Abandoned(BaseException):
    """The Checkpointer was left by an exception: the courier drops what it is doing."""


class Waits:
    """The waits of one rank, and their deadline: that of the job it is in.

    Args:
        timeout_s: deadline of each job, seconds.

    Attributes:
        deadline: of the job, by `time.monotonic`; infinite where there is none, and when it was told of.
        on_late: is told when it has passed.
        waiting_for: the ranks that are waited for; empty: not known.
        inside: the call of MPI that this rank is in, in words.
        job_number: how many jobs this rank has begun.
        waited_s: seconds that this rank has waited so far, for other ranks, its trainer or MPI.
        abandoned: the courier is to drop what it is doing.
        poke: pushes MPI's progress.
        go_on_behind: advances what goes on beside the jobs.
        pings: how ranks are asked whether they are there; None while they cannot be.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.deadline = float("inf")
        self.on_late: Callable[[DeadlineExceeded], None] = lambda error: None
        self.waiting_for: Sequence[int] = ()
        self.inside = "MPI"
        self.job_number = 0
        self.waited_s = 0.0
        self.abandoned = threading.Event()
        self.poke: Callable[[], None] = lambda: None
        self.go_on_behind: Callable[[], None] = lambda: None
        self.pings: Pings | None = None
        self._clock = threading.Lock()  # held by whoever tells of a deadline
        self._naps = 0
        self._last_ping_look = 0.0

    # Deadlines

    def start_job(self, on_late: Callable[[DeadlineExceeded], None]) -> None:
        """Begin a job: the deadline runs from here."""
        self.job_number += 1
        self.on_late = on_late
        self.deadline = time.monotonic() + self.timeout_s

    def end_job(self) -> None:
        """End a job: from here on nobody is told that it is late."""
        with self._clock:
            self.deadline = float("inf")

    def tell_if_held(self, grace_s: float) -> None:
        """Tell of a deadline that passed so long ago while the courier did not come to `pause`; for another thread.

        It is inside of a call of MPI, or works for longer than anybody waits.
        """
        with self._clock:
            if time.monotonic() > self.deadline + grace_s:
                self.deadline = float("inf")
                self.on_late(self._held())

    def _take_deadline(self) -> bool:
        """Whether it is on the caller to tell of the deadline."""
        with self._clock:
            passed = time.monotonic() > self.deadline
            self.deadline = float("inf") if passed else self.deadline
        return passed

    def _late(self, missing: Sequence[int]) -> DeadlineExceeded:
        """Say that some ranks were waited for too long."""
        raise NotImplementedError

    def _held(self) -> DeadlineExceeded:
        """Say that the courier does not come back."""
        raise NotImplementedError

    # Waiting

    def pause(self) -> None:
        """Pass a moment inside a wait: push progress, of what is beside too, answer pings, watch the deadline, sleep.

        Raises:
            Abandoned: the Checkpointer was left by an exception.
            RankFailed: another rank takes part in this job no more.
        """
        if self.abandoned.is_set():
            raise Abandoned
        now = time.monotonic()
        self.poke()
        self.go_on_behind()
        if now - self._last_ping_look > 0.02:
            self.answer_pings()
            self._last_ping_look = now
            failed = None if self.pings is None else self.pings.failed
            if failed is not None and failed.job <= self.job_number:
                raise failed
        if now > self.deadline and self._take_deadline():
            self.on_late(self._late(self._who_is_missing()))
        # Spin a little, then sleep up to 1 ms: with more ranks than cores a spinning rank starves the others.
        self._naps += 1
        if self._naps > 8:
            time.sleep(min(1e-3, 2e-5 * (self._naps - 8)))
        self.waited_s += time.monotonic() - now

    def finish(self, *requests: Any) -> None:
        """Wait for MPI requests."""
        for request in requests:
            self._naps = 0
            while not request.Test():
                self.pause()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until something local is so."""
        self._naps = 0
        while not done():
            self.pause()

    def drive(self, operations: Iterable[Operation]) -> list[Any]:
        """Run step-by-step operations side by side until all are through; returns their results in order."""
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
        """Enter a call of MPI that blocks, when all ranks have come to it; for a ``with`` block. Collective over comm.

        Args:
            call: its name.
            comm: the communicator of those that it waits for.
        """
        self.meet(comm)
        with self.within(call):
            yield

    def meet(self, comm: Any) -> None:
        """Wait until all ranks are here and each knows it of the others. Collective over comm.

        A rank that gives up at the first barrier never comes to the second: nobody goes on from here without it.
        """
        self.finish(comm.Ibarrier())
        self.finish(comm.Ibarrier())

    @contextlib.contextmanager
    def within(self, call: str) -> Iterator[None]:
        """Name the call of MPI that this rank is in; for a ``with`` block. Not collective."""
        self.inside = call
        try:
            yield
        finally:
            self.inside = "MPI"

    # Who is missing: asked only when a deadline has passed

    def answer_pings(self) -> None:
        """Answer those who ask whether we are alive, with the number of the job we are in."""
        if self.pings is not None:
            self.pings.answer()

    def tell_failed(self, text: str) -> None:
        """Tell the other ranks that this one takes part in nothing any more, and why. Not collective."""
        if self.pings is not None:
            self.pings.tell_failed(text)

    def silent(self) -> Operation:
        """Ask all ranks; the result is those that do not answer."""
        return [] if self.pings is None else (yield from self.pings.ask(self._others()))

    def _others(self) -> Sequence[int]:
        """The ranks to ask where it is not known who is waited for."""
        raise NotImplementedError

    def _who_is_missing(self) -> Sequence[int]:
        """Ask the ranks waited for; those that do not answer, or have not come as far as we, are missing."""
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
