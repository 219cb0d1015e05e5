"""The one background thread that makes all MPI calls, in order.

There is exactly one thread and one queue, so that the collectives of all ranks match. The main thread posts jobs and
waits for them with a deadline. If MPI cannot be called from a thread, a job runs inside the call that posts it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import Closed, DeadlineExceeded, MlflashError, text_of
from ..events import Event, Queue
from .deadlines import Abandoned, RankFailed
from .nonblocking import Operation
from .world import World

log = logging.getLogger("mlflash")

_IDLE_S = 0.05  # time between two looks of an idle courier for pings
_ASIDE_S = 0.001, 0.02  # the same while work outside of jobs makes progress, and while it waits
_GRACE_S = 10.0  # limit for an error to arrive after its deadline
_LOOK_S = 0.2  # time between two checks of deadlines
FORKED = (
    "this process was forked from the one that made this Checkpointer, which does not work here: save and restore in "
    "the parent"
)


class Job:
    """A job of the courier; ``on_refused``: called if it is not done because of an earlier error."""

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
        self.woken = Event()
        self.begun = self.is_refused = False
        self._on_late, self._on_end = on_late, on_end

    def end(self) -> None:
        self.woken.set()
        if self._on_end is not None:
            self._on_end(self)

    def is_late(self, error: DeadlineExceeded) -> None:
        self.late = error
        if self._on_late is not None:
            self._on_late(error)
        self.woken.set()


class Posted(Protocol):
    """A job, no matter where it is done."""

    woken: Event
    result: Any
    error: BaseException | None
    late: DeadlineExceeded | None


class Doing(Protocol):
    """A courier: it does jobs, and may be late with its current job or have stopped working."""

    late: DeadlineExceeded | None
    broken: BaseException | None


def wait_for(job: Posted, courier: Doing, timeout_s: float) -> Any:
    """Wait for a posted job; return its result, or raise its error. DeadlineExceeded names the ranks waited for."""
    end = time.monotonic() + timeout_s + _GRACE_S
    while not job.woken.wait(_LOOK_S):
        if time.monotonic() > end and (courier.late is not None or courier.broken is not None):
            break  # otherwise an earlier job is running, with its own deadline
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
        world: the communicators. From now on only the courier uses them.
        threaded: whether there is a thread; otherwise jobs run inside `post`.
    """

    def __init__(self, world: World, threaded: bool):
        self.late: DeadlineExceeded | None = None  # of the job that is past its deadline and still running
        self.broken: BaseException | None = None
        # called now and then while there is nothing else to do, if there is a thread. It makes no MPI calls, and
        # returns soon after its argument, a function, has returned True because a job waits
        self.when_idle: Callable[[Callable[[], bool]], None] | None = None
        self._world = world
        self._aside: Operation | None = None
        self._nap = _ASIDE_S[0]
        world.go_on_behind = self._advance  # the rank that a job waits for may itself wait for this work
        self._queue: Queue[Job | None] = Queue()
        self._thread: threading.Thread | None = None
        self._over = Event()  # the thread has ended
        if threaded:
            self._thread = threading.Thread(target=self._run, name="mlflash-courier", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch, name="mlflash-deadline", daemon=True).start()
        else:
            log.warning("MPI was started without MPI_THREAD_MULTIPLE: save() will wait for the commit")

    def post(self, job: Job) -> None:
        """Queue a job; twice has no effect. Every rank must post the same jobs in the same order."""
        if self._thread is not None:
            self._queue.put(job)
        else:
            self._do(job)
            self._advance()

    def call(self, work: Callable[[], Any]) -> Any:
        """Queue a job and wait for its result; see `wait_for`."""
        job = Job(work)
        self.post(job)
        return wait_for(job, self, self._world.timeout_s)

    @property
    def is_stuck(self) -> bool:
        """Whether a job has passed its deadline, or the courier has stopped working."""
        return self.late is not None or self.broken is not None

    def begin_background(self, moves: Operation) -> None:
        """Begin work outside of the jobs, done a little at a time. To be called in a job; collective if it is."""
        self._aside, self._nap = moves, _ASIDE_S[0]

    def go_on_behind(self) -> None:
        """Advance work outside of the jobs, if no thread does."""
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
        """End the thread, after the posted jobs or, with ``abandon``, at once."""
        if abandon:
            self._world.abandoned.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join(2.0 if abandon else self._world.timeout_s + _GRACE_S)

    def leave(self) -> None:
        """Do nothing in a forked process, where thread and MPI belong to the parent: what waits gets an error."""
        self.late, self.broken = DeadlineExceeded(FORKED), Closed(FORKED)
        self._aside = None

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            self._over.set()

    def _serve(self) -> bool:
        """Do the next job, or other work while there is none. Return whether to go on."""
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
        return True  # and `job` goes out of scope, because an idle courier must not keep a state alive

    def _watch(self) -> None:
        """Report deadlines when the courier thread cannot, because it is inside MPI. Waiting threads need no MPI."""
        while not self._over.wait(_LOOK_S):
            self._world.tell_if_held(_GRACE_S)

    def _look_around(self) -> None:
        """Answer pings while there is nothing to do."""
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
                raise error  # no other thread can go on with the job: it ends here, and this Checkpointer with it

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
        except MlflashError as error:  # all ranks have agreed on it: the queue goes on
            job.error = error
            if self._thread is None and self.late is not None:
                self.broken = error
        except RankFailed as error:  # that rank has reported it, and has stopped working
            job.error = self.broken = Closed(str(error), ranks=[error.rank])
            log.error("mlflash stops saving on rank %d: %s", self._world.rank, error)
        except BaseException as error:  # the outermost code of the courier: whoever waits raises the error
            job.error = error
            self._fail(error)
            if self._thread is None and not isinstance(error, Exception):
                raise
        finally:
            self._world.end_job()
            self.late = None
            job.end()

    def _fail(self, error: BaseException) -> None:
        """Stop working, and tell the other ranks, so that they do not wait: it is unknown where this rank stopped."""
        self._world.end_if_mpi_failed(error)
        self.broken = error
        log.error("mlflash stops saving on rank %d: the courier failed", self._world.rank, exc_info=error)
        self._world.tell_failed(f"the courier of rank {self._world.rank} failed: {text_of(error)}")
