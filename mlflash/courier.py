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
from collections.abc import Callable
from typing import Any

from .comm import Abandoned, World
from .errors import Closed, DeadlineExceeded, MlflashError
from .moves import Moves

log = logging.getLogger("mlflash")

_IDLE_S = 0.05  # how often an idle courier looks for pings
_ASIDE_S = 0.001, 0.02  # the same while something beside its jobs gets on; and while it waits
_GRACE_S = 10.0  # how long after a deadline its error may take to arrive
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
    """

    def __init__(
        self,
        work: Callable[[], Any],
        on_late: Callable[[DeadlineExceeded], None] | None = None,
        on_refused: Callable[[MlflashError], None] | None = None,
    ):
        self.work = work
        self.on_refused = on_refused
        self.result: Any = None
        self.error: BaseException | None = None
        self.late: DeadlineExceeded | None = None
        self.woken = threading.Event()
        self._on_late = on_late

    def is_late(self, error: DeadlineExceeded) -> None:
        self.late = error
        if self._on_late is not None:
            self._on_late(error)
        self.woken.set()


class Courier:
    """Runs jobs one after the other.

    Args:
        world: the communicators; from here on only the courier uses them.
        threaded: whether there is a thread, or jobs run inside `post`.
        nice: niceness of the thread.
    """

    def __init__(self, world: World, threaded: bool, nice: int = 0):
        self.late: DeadlineExceeded | None = None  # of the job that is past its deadline and still running
        self.broken: BaseException | None = None
        self._world = world
        self._aside: Moves | None = None
        self._nap = _ASIDE_S[0]
        world.go_aside = self._advance  # a job may wait for a rank that waits for what goes on here
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, args=(nice,), name="mlflash-courier", daemon=True)
            self._thread.start()
        else:
            log.warning("MPI was started without MPI_THREAD_MULTIPLE: save() will wait for the commit")

    def post(self, job: Job) -> None:
        """Queue a job. Not collective, but every rank must post the same jobs in the same order."""
        if self._thread is not None:
            self._queue.put(job)
        else:
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
        while not job.woken.wait(self._world.timeout_s + _GRACE_S):
            if self.late is not None or self.broken is not None:
                break  # else an earlier job has the floor, and its own deadline runs
        if job.error is not None:
            raise job.error
        if job.late is not None:
            raise job.late
        if not job.woken.is_set() and self.late is not None:
            raise self.late
        return job.result

    def begin_aside(self, moves: Moves) -> None:
        """Let something go on beside the jobs, a little at a time; for a job. Collective as that is."""
        self._aside, self._nap = moves, _ASIDE_S[0]

    def go_aside(self) -> None:
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
                log.exception("mlflash stops saving on rank %d: the courier failed", self._world.rank)
                self._aside, self.broken = None, error

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
        while True:
            try:
                job = self._queue.get(timeout=_IDLE_S if self._aside is None else self._nap)
            except queue.Empty:
                if self._world.abandoned.is_set():
                    return
                self._advance()
                self._world.answer_pings()
                continue
            if job is None:
                return
            self._do(job)
            self._advance()
            del job  # while the courier waits for the next one, it must not keep a state alive

    def _do(self, job: Job) -> None:
        def on_late(error: DeadlineExceeded) -> None:
            self.late = error
            job.is_late(error)
            if self._thread is None:
                raise error  # nobody can go on waiting: the job ends here, and with it this Checkpointer

        if self.broken is not None or self._world.abandoned.is_set():
            refused = Closed("mlflash stopped after an earlier error", found=self.broken)
            job.error = refused
            if job.on_refused is not None:
                job.on_refused(refused)
            job.woken.set()
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
        except Exception as error:  # the courier's edge: stored here, raised where somebody waits
            log.exception("mlflash stops saving on rank %d: the courier failed", self._world.rank)
            self.broken = job.error = error
        self._world.deadline = float("inf")
        self.late = None
        job.woken.set()
