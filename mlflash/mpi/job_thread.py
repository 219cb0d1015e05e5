"""The one background thread that makes all MPI calls, in order.

Exactly one thread and one queue, so that the collectives of all ranks match. The main thread posts jobs and
waits for them with a deadline. Where MPI cannot be called from a thread, a job runs inside the call that posts
it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import Closed, DeadlineExceeded, MlflashError, text_of
from .deadlines import Abandoned
from .liveness_pings import RankFailed
from .nonblocking import Operation
from .world import World

log = logging.getLogger("mlflash")

_IDLE_S = 0.05  # how often an idle courier looks for pings
_ASIDE_S = 0.001, 0.02  # the same while something beside its jobs gets on; and while it waits
_GRACE_S = 10.0  # how long after a deadline its error may take to arrive
_LOOK_S = 0.2  # how often deadlines are looked at
FORKED = (
    "this process was forked from the one that made this Checkpointer, and nothing of it works here: save and restore "
    "in the parent"
)


class Job:
    """Something the courier does; the main thread waits for its end or its being late.

    Args:
        work: what to do.
        on_late: told when the deadline has passed.
        on_refused: told when the courier will not do it, after an earlier error.
        on_end: told when it has ended, or was refused, with this.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        on_late: Callable[[DeadlineExceeded], None] | None = None,
        on_refused: Callable[[MlflashError], None] | None = None,
        on_end: Callable[[Job], None] | None = None,
    ):
        self.work = work
        self.on_refused = on_refused
        self.result: Any = None
        self.error: BaseException | None = None
        self.late: DeadlineExceeded | None = None
        self.woken = threading.Event()
        self.begun = self.is_refused = False
        self._on_late, self._on_end = on_late, on_end

    def end(self) -> None:
        """Wake who waits for it."""
        self.woken.set()
        if self._on_end is not None:
            self._on_end(self)

    def is_late(self, error: DeadlineExceeded) -> None:
        self.late = error
        if self._on_late is not None:
            self._on_late(error)
        self.woken.set()


class Posted(Protocol):
    """A job, wherever it is done."""

    woken: threading.Event
    result: Any
    error: BaseException | None
    late: DeadlineExceeded | None


class Doing(Protocol):
    """Who does jobs, and may be late with the one that it does, or do no more."""

    late: DeadlineExceeded | None
    broken: BaseException | None


def wait_for(job: Posted, courier: Doing, timeout_s: float) -> Any:
    """Wait for a job that was posted, and give its result.

    Raises:
        DeadlineExceeded: naming the ranks waited for.
        Exception: whatever the job raised.
    """
    end = time.monotonic() + timeout_s + _GRACE_S
    while not job.woken.wait(_LOOK_S):
        if time.monotonic() > end and (courier.late is not None or courier.broken is not None):
            break  # else an earlier job has the floor, and its own deadline runs
    if job.error is not None:
        raise job.error
    if job.late is not None:
        raise job.late
    if not job.woken.is_set():
        raise courier.late or Closed("mlflash stopped after an earlier error", found=courier.broken)
    return job.result


class JobThread:
    """Runs jobs one after the other.

    Args:
        world: the communicators; from here on only the courier uses them.
        threaded: whether there is a thread, or jobs run inside `post`.
        nice: niceness of the thread.

    Attributes:
        when_idle: done now and then while nothing else is to be done, where there is a thread. It calls no MPI, and
            returns soon after what it is given says that a job waits.
    """

    def __init__(self, world: World, threaded: bool, nice: int = 0):
        self.late: DeadlineExceeded | None = None  # of the job that is past its deadline and still running
        self.broken: BaseException | None = None
        self.when_idle: Callable[[Callable[[], bool]], None] | None = None
        self._world = world
        self._aside: Operation | None = None
        self._nap = _ASIDE_S[0]
        world.go_on_behind = self._advance  # a job may wait for a rank that waits for what goes on here
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # the thread has ended
        if threaded:
            self._thread = threading.Thread(target=self._run, args=(nice,), name="mlflash-courier", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch, name="mlflash-deadline", daemon=True).start()
        else:
            log.warning("MPI was started without MPI_THREAD_MULTIPLE: save() will wait for the commit")

    @property
    def post(self) -> Callable[[Job], None]:
        """Queue a job. Not collective, but every rank must post the same jobs in the same order.

        A job that is posted twice is done once. Where there is a thread, this gives a function that is written in C:
        no exception of a signal handler can come in the middle of it.
        """
        return self._do_here if self._thread is None else self._queue.put

    def _do_here(self, job: Job) -> None:
        self._do(job)
        self._advance()

    def call(self, work: Callable[[], Any]) -> Any:
        """Queue a job and wait for its result.

        Raises:
            DeadlineExceeded: naming the ranks waited for.
            Exception: whatever the job raised.
        """
        job = Job(work)
        self.post(job)
        return wait_for(job, self, self._world.timeout_s)

    @property
    def is_stuck(self) -> bool:
        """Whether a job does not end, or no more are done."""
        return self.late is not None or self.broken is not None

    def begin_background(self, moves: Operation) -> None:
        """Let something go on beside the jobs, a little at a time; for a job. Collective as that is."""
        self._aside, self._nap = moves, _ASIDE_S[0]

    def go_on_behind(self) -> None:
        """Advance what goes on beside the jobs, where there is no thread that does. Not collective."""
        if self._thread is None:
            self._advance()

    def _advance(self) -> None:
        self._nap = min(_ASIDE_S[1], 1.3 * self._nap)
        moved = True
        while moved and self._aside is not None and self.broken is None:
            try:
                moved = next(self._aside)
                if moved:
                    self._nap = _ASIDE_S[0]
            except StopIteration:
                self._aside = None
            except Exception as error:
                self._aside = None
                self._fail(error)

    def stop(self, abandon: bool) -> None:
        """End the thread: after the jobs posted so far, or at once, in the middle of whatever it does."""
        if abandon:
            self._world.abandoned.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join(2.0 if abandon else self._world.timeout_s + _GRACE_S)

    def leave(self) -> None:
        """Do nothing in a process that was forked: the thread is the parent's, and so are MPI's connections.

        Not collective. What waits there for the parent's jobs is told so.
        """
        self.late, self.broken = DeadlineExceeded(FORKED), Closed(FORKED)
        self._aside = None

    def _run(self, nice: int) -> None:
        here = threading.get_native_id()  # on Linux niceness is of a thread
        if nice > os.getpriority(os.PRIO_PROCESS, here):
            os.setpriority(os.PRIO_PROCESS, here, nice)
        try:
            while self._serve():
                pass
        finally:
            self._over.set()

    def _serve(self) -> bool:
        """Do the next job, or what there is to do meanwhile; whether there may be another."""
        try:
            job = self._queue.get(timeout=_IDLE_S if self._aside is None else self._nap)
        except queue.Empty:
            if self._world.abandoned.is_set():
                return False
            self._advance()
            self._look_around()
            self._use_idle_time()
            return True
        if job is None:
            return False
        self._do(job)
        self._advance()
        return True  # while the courier waits for the next one, it must not keep a state alive

    def _watch(self) -> None:
        """Tell of deadlines where the thread cannot, as it is inside of MPI: whoever waits is no part of that."""
        while not self._over.wait(_LOOK_S):
            self._world.tell_if_held(_GRACE_S)

    def _look_around(self) -> None:
        """Answer who asks, while there is nothing to do."""
        if self.broken is None:
            try:
                self._world.answer_pings()
            except Exception as error:
                self._fail(error)

    def _use_idle_time(self) -> None:
        if self.when_idle is None or self._aside is not None or self.broken is not None:
            return
        try:
            self.when_idle(lambda: not self._queue.empty())
        except Exception as error:  # no job depends on it
            self.when_idle = None
            log.warning("rank %d verifies nothing at rest any more", self._world.rank, exc_info=error)

    def _do(self, job: Job) -> None:
        if job.begun:
            return
        job.begun = True

        def on_late(error: DeadlineExceeded) -> None:
            self.late = error
            job.is_late(error)
            if self._thread is None:
                raise error  # nobody can go on waiting: the job ends here, and with it this Checkpointer

        if self.broken is not None or self._world.abandoned.is_set():
            refused = Closed("mlflash stopped after an earlier error", found=self.broken)
            job.error, job.is_refused = refused, True
            if job.on_refused is not None:
                job.on_refused(refused)
            job.end()
            return
        self._world.start_job(on_late)
        try:
            job.result = job.work()
        except Abandoned:
            job.error = Closed("the Checkpointer was left by an exception")
        except MlflashError as error:  # agreed on by all ranks: the queue goes on
            job.error = error
            if self._thread is None and self.late is not None:
                self.broken = error
        except RankFailed as error:  # it said so, and takes part in nothing any more
            job.error = self.broken = Closed(str(error), ranks=[error.rank])
            log.error("mlflash stops saving on rank %d: %s", self._world.rank, error)
        except BaseException as error:  # the courier's edge: stored here, raised where somebody waits
            job.error = error
            self._fail(error)
            if self._thread is None and not isinstance(error, Exception):
                raise
        finally:
            self._world.end_job()
            self.late = None
            job.end()

    def _fail(self, error: BaseException) -> None:
        """Do nothing any more, and tell the other ranks, which need not wait: nobody knows where this one stopped."""
        self._world.end_if_mpi_failed(error)
        self.broken = error
        log.error("mlflash stops saving on rank %d: the courier failed", self._world.rank, exc_info=error)
        self._world.tell_failed(f"the courier of rank {self._world.rank} failed: {text_of(error)}")
