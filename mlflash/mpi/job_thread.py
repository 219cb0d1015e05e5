"""The one background thread that makes all MPI calls, in order.

There is exactly one thread and one queue, so that the collectives of all ranks match. Another thread posts the jobs
that the trainer asks for.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import Closed, DeadlineExceeded, MlflashError, text_of
from ..events import Event, Queue
from .deadlines import Abandoned, RankFailed
from .nonblocking import Operation
from .world import World

log = logging.getLogger("mlflash")

_IDLE_S = 0.05  # time between two looks of an idle courier for pings
_BACKGROUND_S = 0.001, 0.02  # the same while work outside of jobs makes progress, and while it waits
_GRACE_S = 10.0  # limit for an error to arrive after its deadline
_CHECK_S = 0.2  # time between two checks of deadlines


@dataclasses.dataclass(eq=False)
class Job:
    """A job of the courier.

    Attributes:
        on_late: called when its deadline has passed.
        on_end: called at its end, with the job.
        is_refused: whether it was not done because of an earlier error.
    """

    work: Callable[[], Any]
    on_late: Callable[[DeadlineExceeded], None]
    on_end: Callable[[Job], None]
    result: Any = None
    error: BaseException | None = None
    is_refused: bool = False


class JobThread:
    """Runs jobs one after the other. ``world``: the communicators, which from now on only this thread uses."""

    def __init__(self, world: World):
        self.broken: BaseException | None = None
        # called now and then while there is nothing else to do. It makes no MPI calls, and returns soon after its
        # argument, a function, has returned True because a job waits
        self.when_idle: Callable[[Callable[[], bool]], None] | None = None
        self._world = world
        self._background: Operation | None = None
        self._nap = _BACKGROUND_S[0]
        world.run_background = self._advance  # the rank that a job waits for may itself wait for this work
        self._queue: Queue[Job | None] = Queue()
        self._over = Event()  # the thread has ended
        self._thread = threading.Thread(target=self._run, name="mlflash-jobs", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="mlflash-deadline", daemon=True).start()

    def post(self, job: Job) -> None:
        """Queue a job. Every rank must post the same jobs in the same order."""
        self._queue.put(job)

    def begin_background(self, moves: Operation) -> None:
        """Begin work outside of the jobs, done a little at a time. To be called in a job; collective if it is."""
        self._background, self._nap = moves, _BACKGROUND_S[0]

    def _advance(self) -> None:
        self._nap = min(_BACKGROUND_S[1], 1.3 * self._nap)
        moved = True
        while moved and self._background is not None and self.broken is None:
            try:
                moved = next(self._background)
                if moved:
                    self._nap = _BACKGROUND_S[0]
            except StopIteration:
                self._background = None
            except Exception as error:
                self._background = None
                self._fail(error)

    def stop(self, abandon: bool) -> None:
        """End the thread, after the posted jobs or, with ``abandon``, at once."""
        if abandon:
            self._world.abandoned.set()
        self._queue.put(None)
        self._thread.join(2.0 if abandon else self._world.timeout_s + _GRACE_S)

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            self._over.set()

    def _serve(self) -> bool:
        """Do the next job, or other work while there is none. Return whether to go on."""
        try:
            job = self._queue.get(timeout=_IDLE_S if self._background is None else self._nap)
        except queue.Empty:
            if self._world.abandoned.is_set():
                return False
            self._advance()
            self._use_idle_time()
            return True
        if job is None:
            return False
        self._do(job)
        self._advance()
        return True  # and `job` goes out of scope, because an idle courier must not keep a state alive

    def _watch(self) -> None:
        """Report deadlines when that thread cannot, because it is inside MPI. Waiting threads need no MPI."""
        while not self._over.wait(_CHECK_S):
            self._world.tell_if_held(_GRACE_S)

    def _use_idle_time(self) -> None:
        if self.broken is not None:
            return
        try:
            self._world.answer_pings()
        except Exception as error:
            self._fail(error)
        if self.when_idle is None or self._background is not None or self.broken is not None:
            return
        try:
            self.when_idle(lambda: not self._queue.empty())
        except Exception as error:  # no job depends on it
            self.when_idle = None
            log.warning("rank %d verifies nothing at rest any more", self._world.rank, exc_info=error)

    def _do(self, job: Job) -> None:
        if self.broken is not None or self._world.abandoned.is_set():
            job.error = Closed("mlflash stopped after an earlier error", found=self.broken)
            job.is_refused = True
            job.on_end(job)
            return
        self._world.start_job(job.on_late)
        try:
            job.result = job.work()
        except Abandoned:
            job.error = Closed("the Checkpointer was left by an exception")
        except MlflashError as error:  # it is raised on all ranks, see `courier.session`: the queue goes on
            job.error = error
        except RankFailed as error:  # that rank has reported it, and has stopped working
            job.error = self.broken = Closed(str(error), ranks=[error.rank])
            log.error("mlflash stops saving on rank %d: %s", self._world.rank, error)
        except BaseException as error:  # the outermost code of the courier: whoever waits raises the error
            job.error = error
            self._fail(error)
        finally:
            self._world.end_job()
            job.on_end(job)

    def _fail(self, error: BaseException) -> None:
        """Stop working, and tell the other ranks, so that they do not wait: it is unknown where this rank stopped."""
        self._world.end_if_mpi_failed(error)
        self.broken = error
        log.error("mlflash stops saving on rank %d: the courier failed", self._world.rank, exc_info=error)
        self._world.tell_failed(f"the courier of rank {self._world.rank} failed: {text_of(error)}")
