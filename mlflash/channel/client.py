"""How a trainer calls its courier.

One thread sends, one receives. For each Checkpointer another thread answers the courier's questions and processes the
ends of jobs, in the order in which the courier sends them. No thread calls MPI, and each acts only on what comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..config import Config
from ..errors import Closed, DeadlineExceeded, MlflashError, SaveFailed, text_of
from ..events import Event
from ..memory.copy_threads import CopyThreads
from ..memory.node_directory import NodeDirectory
from ..memory.own_slots import OwnSlots, SlotFile
from ..protect.deduplication import SharingNews, key_of
from ..state.leaves import Leaf
from ..telemetry.recorder import TrainerRecorder
from ..version import __version__
from .channel import Call, PendingCall, Reply
from .connection import Connection
from .ranks import Ranks
from .records import SaveRequest, Start, Started

log = logging.getLogger("mlflash")

FORKED = (
    "this process was forked from the one that made this Checkpointer, which does not work here: save and restore in "
    "the parent"
)
_ANEW = "the couriers of this run were started anew during this call"
_ANSWER_S = 10.0  # limit for answers outside of jobs, and for an error after its deadline
_CLOSE_S = 3.0  # limit to close a session that is abandoned or has no courier any more
_POLL_S = 0.2
_WATCH_S = 1.0  # time between two looks for a job that is late


@dataclasses.dataclass
class TrainerState:
    """What saving and restoring work with in the trainer."""

    config: Config
    courier: Client
    ranks: Ranks
    memory: NodeDirectory
    slots: OwnSlots
    copy_threads: CopyThreads
    recorder: TrainerRecorder
    provenance: Mapping[str, Any]
    sharing: SharingNews = dataclasses.field(default_factory=SharingNews)
    is_unprotected: bool = False  # whether the restored step does not have full redundancy yet

    def is_shared(self, leaf: Leaf) -> bool:
        """Whether the ranks have agreed that all that share hold this leaf alike."""
        return key_of(leaf.entry) in self.sharing.agreed

    def update(self, files: Iterable[SlotFile], has_free: bool, sharing: SharingNews | None, is_unprotected: bool
               ) -> None:  # fmt: skip
        self.slots.update(files)
        self.sharing, self.is_unprotected = sharing or self.sharing, is_unprotected
        if has_free:
            self.slots.freed()


class Client:
    """Calls methods of the session that a Checkpointer has in its courier: see `courier.session.Session`.

    Jobs belong to restart scopes: operations, such as a restore, that fail together if couriers are started anew in the
    middle of them. All ranks do the same operations in the same order and number them alike. When couriers end, the
    jobs that they were doing are lost, and each rank may have reached another job. So no rank continues a scope that
    any rank was in: its next job would meet other jobs on the other ranks.

    Attributes:
        late: the error of the job that has passed its deadline and still runs.
        broken: why the courier has stopped working; None while it works.
        trainer: what the courier updates; None: it is not made yet.
        start: how this Checkpointer was introduced to its courier; None: it was not, or its courier was lost.
    """

    drain_moved: Callable[[int, Mapping[str, Any]], None]
    _drains_lost: Callable[[], None]

    def __init__(self, connection: Connection, config: Config, ranks: tuple[int, ...]):
        self._connection, self._config, self.number = connection, config, connection.number()
        self.late: DeadlineExceeded | None = None
        self.broken: BaseException | None = None
        self.is_closed = self._is_down = self._is_unused = False
        self._free: PendingCall | None = None  # the last job of a session
        self._is_freed = False  # freed on all ranks: if a courier ends now, nothing is lost
        self._ended_step: int | None = None  # the newest step whose save has ended
        self._generation = 0  # generation of the newest attempt that has ended
        self.trainer: TrainerState | None = None
        self._has_trainer = Event()
        self.start: Start | None = None
        self._starting: PendingCall | None = None  # the job that introduces it for the first time
        self._jobs: dict[int, PendingCall] = {}
        self._questions: dict[int, PendingCall] = {}  # calls that are no jobs
        self._scope_numbers = itertools.count(1)
        self._scopes: dict[int, int] = {}  # the restart scope that each thread is in
        # the newest scopes that this rank was in when its courier ended, and that any rank was in; 0: none
        self._interrupted_scope = self._failed_scope = 0
        self._frames: queue.SimpleQueue[Call | Reply | Event | None] = queue.SimpleQueue()
        self.ranks, self._before = ranks, connection.add(self.number, self, ranks)
        self._name = f"{zlib.crc32(repr(ranks).encode()):08x}-{self._before}"  # the same on all ranks
        self._over = Event()
        threading.Thread(target=self._answer, name="mlflash-answers", daemon=True).start()
        threading.Thread(target=self._watch, name="mlflash-late-jobs", daemon=True).start()

    def _opened(self) -> PendingCall:
        args = (__version__, log.getEffectiveLevel(), self._config, self.ranks, self._before)
        return PendingCall(self, Call(self.number, 0, "open", args), is_kept=True)

    def introduce(self, start: Start) -> Started:
        """Introduce this Checkpointer to the courier, or to the next one if this one ends meanwhile. Collective.

        Raises what `Session.start` raises, on all ranks, and what `call` raises.
        """
        job = self.job("start", start)
        job.is_kept = True
        self.start, self._starting = start, job
        self._connection.queue.put(self._opened())
        started: Started = self._result_of(job)
        return started

    def attach(self, trainer: TrainerState, drain_moved: Callable[[int, Mapping[str, Any]], None],
               drains_lost: Callable[[], None]) -> None:  # fmt: skip
        """Set what the courier updates: it tells how far a drain is, by its number; or that it has ended."""
        self.drain_moved, self._drains_lost = drain_moved, drains_lost
        self.trainer = trainer
        self._has_trainer.set()

    @property
    def is_stuck(self) -> bool:
        """Whether a job has passed its deadline, or the courier has stopped working."""
        return self.late is not None or self.broken is not None

    @property
    def is_a(self) -> str:
        """Which process it is, where it runs, and how the ranks met."""
        return self._connection.is_a

    # Jobs

    def job(self, method: str, *args: Any, answers: Any = None, fds: tuple[int, ...] = (),
            on_late: Callable[[DeadlineExceeded], None] | None = None,
            on_refused: Callable[[MlflashError], None] | None = None) -> PendingCall:  # fmt: skip
        """Make a job for `post`.

        Args:
            answers: what the courier may ask in the meantime, if the method says so.
            fds: descriptors that go with it.
            on_late: called when the deadline has passed.
            on_refused: called if the courier does not do the job because of an earlier error.
        """
        job = PendingCall(self, Call(self.number, self._connection.number(), method, args, job=1))
        job.answers, job.fds, job.on_late, job.on_refused = answers, fds, on_late, on_refused
        job.is_kept = method in ("commit", "free")
        if method == "free":
            self._free = job
        job.scope = self._scopes.get(threading.get_ident(), 0)
        self._jobs[job.number] = job
        return job

    def post(self, job: PendingCall) -> None:
        """Post a job made by `job`. Collective.

        A job that is posted twice is done once: who is interrupted by an exception of a signal handler posts it again.
        """
        self._connection.queue.put(job)

    def wait_sent(self, job: PendingCall) -> None:
        """Wait until the courier has a posted job, not until it is done: then it does not depend on this process."""
        job.sent.wait(_ANSWER_S)

    @contextlib.contextmanager
    def restart_scope(self, joins: bool = False) -> Iterator[None]:
        """Put all jobs that this thread posts in the ``with`` block into one scope, or (``joins``) into an outer one.

        Collective: all ranks enter the same scopes in the same order. If couriers are started anew on any rank during
        a scope, its calls raise Closed on all ranks.
        """
        thread = threading.get_ident()
        outer = self._scopes.get(thread)
        if outer is None or not joins:
            self._scopes[thread] = next(self._scope_numbers)
        try:
            yield
        finally:
            if outer is None:
                self._scopes.pop(thread, None)
            else:
                self._scopes[thread] = outer

    def call(self, method: str, *args: Any, answers: Any = None, fds: tuple[int, ...] = ()) -> Any:
        """Post a job and wait for its result. Collective.

        Raises:
            DeadlineExceeded: naming the ranks waited for.
            Closed: the courier has stopped working.
            MlflashError: on all ranks, as the method says.
        """
        with self.restart_scope(joins=True):
            return self._result_of(self.job(method, *args, answers=answers, fds=fds))

    def _result_of(self, job: PendingCall) -> Any:
        self.post(job)
        if self.broken is not None:
            self._refuse(job)
        end = time.monotonic() + self._config.timeout_s + _ANSWER_S
        while not job.woken.wait(_POLL_S):
            if time.monotonic() > end and self.is_stuck:
                break  # otherwise an earlier job is running, with its own deadline
        if job.error is not None:
            raise job.error
        if job.late is not None:
            raise job.late
        if not job.woken.is_set():
            raise self.late or Closed("mlflash stopped after an earlier error", found=self.broken)
        return job.result

    # Questions and notices outside of jobs

    def ask(self, method: str, *args: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Call a method that is no job and is answered at once. Raises DeadlineExceeded or Closed if it is not."""
        return self._ask(self._connection.queue.put, method, args, timeout_s)

    def _ask(self, send: Callable[[PendingCall], None], method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        call = PendingCall(self, Call(self.number, self._connection.number(), method, args), is_kept=True)
        self._questions[call.number] = call
        try:
            send(call)
            end = time.monotonic() + timeout_s
            self._connection.check()
            while not call.woken.wait(_POLL_S):
                self._connection.check()
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"the courier of this rank did not answer for {timeout_s:g} s")
            if call.error is not None:
                raise call.error
            return call.result
        finally:
            del self._questions[call.number]

    def notify(self, method: str, *args: Any, is_kept: bool = False) -> None:
        """Call a method without waiting for it; ``is_kept``: of the next courier, if there is none now."""
        self._connection.queue.put(PendingCall(self, Call(self.number, 0, method, args), is_kept))

    def lease(self, number: int, leave: bool, lent: Collection[int]) -> Sequence[SlotFile]:
        """Lease own slots; see `SlotPool.lease`. Empty if the courier does not answer: who saves finds out why."""
        try:
            files: Sequence[SlotFile] = self.ask("lease", number, leave, lent)
        except (Closed, DeadlineExceeded):  # the courier may still lease them
            self.release(number, ())
            return ()
        return files

    def release(self, number: int, given_up: Collection[int]) -> None:
        """Give a lease back that no save used; see `SlotPool.end_lease`."""
        self.notify("release", number, given_up, is_kept=True)

    def tell_doing(self, what: str) -> None:
        """Tell the courier what this rank does, for ranks that wait for it; "" at its end."""
        self.notify("tell_doing", what)

    def stop(self, abandon: bool) -> None:
        """End the session, after the posted jobs or, with ``abandon``, at once."""
        patience_s = _CLOSE_S if abandon or self._is_freed else self._config.timeout_s  # freed: it is idle or dead
        with contextlib.suppress(Closed, DeadlineExceeded):
            self.ask("close", abandon, timeout_s=patience_s)
        self.is_closed = True  # its report can still be read
        self._frames.put(None)
        self._over.set()

    def leave(self) -> None:
        """Do nothing more in a forked process: the courier belongs to the parent."""
        self.late, self.broken = DeadlineExceeded(FORKED), Closed(FORKED)

    # What comes from the courier

    def take(self, frame: Call | Reply) -> None:
        """Take what has arrived; the thread that answers does what must be in order."""
        if isinstance(frame, Reply) and (question := self._questions.get(frame.number)) is not None:
            question.end(frame.error, frame.result)
        elif isinstance(frame, Call) and frame.method == "late":
            number, error = frame.args
            if (late := self._jobs.get(number)) is not None:
                self.late = error
                late.be_late(error)
        elif isinstance(frame, Call) and frame.number and self.is_closed:
            closed = Closed("this Checkpointer was closed")  # a save that an exception left is still under way
            self._connection.queue.put(PendingCall(self, Reply(self.number, frame.number, None, closed)))
        else:
            self._frames.put(frame)

    def _watch(self) -> None:
        """Report that a job is late if the courier cannot, for example because it is stopped."""
        watched: int | None = None
        since = 0.0
        while not self._over.wait(_WATCH_S):
            oldest = next((number for number, job in list(self._jobs.items()) if job.is_sent), None)  # keeps no job
            if oldest is None or oldest != watched or self.is_stuck or self._is_down:
                watched, since = oldest, time.monotonic()
            elif time.monotonic() > since + self._config.timeout_s:
                since = time.monotonic()
                self._report_if_silent(oldest)

    def _report_if_silent(self, number: int) -> None:
        try:
            self.ask("run_facts")  # it answers, even with an error
        except Closed:
            pass  # all jobs hear of it
        except DeadlineExceeded:
            job = self._jobs.get(number)
            if job is not None and not self._is_down:
                rank = self._connection.couriers.rank
                node = None if self.trainer is None else self.trainer.ranks.node_name
                self.late = DeadlineExceeded(
                    f"waited {self._config.timeout_s:g} s, and the courier of this rank (pid {self._connection.pid}) "
                    "does not answer: look whether it is stopped. The last committed step is untouched. When it goes "
                    "on, saves work again; if it does not, relaunch the job", rank=rank, node=node, ranks=[rank],
                )  # fmt: skip
                job.be_late(self.late)

    def _answer(self) -> None:
        while (frame := self._frames.get()) is not None:
            if isinstance(frame, Event):
                frame.set()
                continue
            try:
                if isinstance(frame, Reply):
                    self._done(frame)
                elif frame.number:
                    self._reply(frame)
                elif (target := self._target_of(frame)) is not None:
                    if frame.method == "ended":  # a save that was late; what else its job does has a new deadline
                        self.late = None
                    getattr(target, frame.method)(*frame.args)
            except Exception as error:
                log.exception("a call of the courier could not be processed")
                self.lose(Closed("a call of this rank's courier could not be processed", found=text_of(error)))

    def _target_of(self, call: Call) -> Any:
        """The object whose method the courier calls; None: a job that has ended, or a trainer that is not made yet."""
        if call.method in ("broke", "drain_moved"):
            return self
        if not call.job:
            return self.trainer
        job = self._jobs.get(call.job)
        return None if job is None else job.answers

    def _done(self, reply: Reply) -> None:
        job = self._jobs.pop(reply.number, None)
        if job is None:  # it was refused, or asked in vain
            return
        if reply.refused and job.on_refused is not None and reply.error is not None:
            job.on_refused(reply.error)
        self.late = None
        if job.method == "commit":
            self._ended_step = job.answers.request.step
            self._generation = self._generation if reply.error is not None else reply.result
        if reply.error is None and job is self._free:
            self._note_freed()
        job.end(reply.error, reply.result)

    def _reply(self, call: Call) -> None:
        result: Any = None
        error: MlflashError | None = None
        try:
            result = getattr(self._target_of(call), call.method)(*call.args)
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # from torch, a device or an adapter
            error = SaveFailed(f"the state could not be copied: {text_of(problem)}")
        # Who asks waits for it, also a courier that is still coming up, for which the queue is held back.
        self._connection.send_first(PendingCall(self, Reply(self.number, call.number, result, error)))

    def broke(self, error: MlflashError) -> None:
        """Note that the courier has stopped working."""
        self.broken = None if self._is_down else error

    def _note_freed(self) -> None:
        """Note that all ranks are done with this Checkpointer, no matter how couriers end, if `free` was posted."""
        if self._free is not None and not self._is_freed:
            self._is_freed = True
            self._connection.freed.append(self._name)
            self._jobs.pop(self._free.number, None)
            self._free.woken.set()

    def lose(self, why: Closed) -> None:
        """End all waits for a courier that has ended and has no successor."""
        self._note_freed()  # if only `free` was left: all saves have ended
        if self.is_closed or self._is_freed:
            return
        if self.start is not None or self.broken is None:  # it was not lost before
            # kept: the next round saves
            is_meant = sys.is_finalizing() or self._connection.is_closing or self._connection.is_kept
            log.log(logging.DEBUG if is_meant else logging.WARNING, "nothing is saved any more: %s", why)
        self.broken, self.start = self.broken or why, None  # permanently
        self._lose_drains()
        for job in list(self._jobs.values()):
            self._refuse(job)

    def wait_done(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        for job in [job for job in list(self._jobs.values()) if job.is_sent]:
            job.woken.wait(max(0.0, end - time.monotonic()))

    # From one courier to the next

    def go_down(self, pid: int, why: str) -> None:
        """Fail what is under way, because another courier follows. May be called twice."""
        if self.is_closed or self._is_freed:
            return
        if not self._is_down:
            self._is_down, self._is_unused, self.late = True, False, None
            self._interrupted_scope = max([self._failed_scope, *list(self._scopes.values())])
            if self.trainer is not None:
                self.trainer.recorder.courier_died(pid, why)
            self.broken = None if self.start is not None else self.broken  # it failed because another one had ended
            self._lose_drains()
            for call in [call for call in list(self._questions.values()) if not call.woken.is_set()]:
                call.end(Closed(_ANEW))
        for job in [job for job in list(self._jobs.values()) if job.is_sent and not job.is_kept]:
            self._refuse(job, f"{_ANEW}: {why}")

    def check(self, job: PendingCall) -> None:
        """Raise Closed if the courier has stopped, or a job is of a restart scope that no rank may continue."""
        if 0 < job.scope <= self._failed_scope and not job.is_kept:
            raise Closed(_ANEW)
        if self.broken is not None:
            raise Closed("mlflash stopped after an earlier error", found=self.broken)

    def wait_unused(self) -> None:
        """Wait until nothing uses the last courier and no slot is being filled. Raises DeadlineExceeded."""
        if self.is_closed or self.trainer is None:
            return
        idle, end = Event(), time.monotonic() + self._config.timeout_s
        self._frames.put(idle)
        while not idle.wait(_POLL_S):
            if self.is_closed:
                return
            if time.monotonic() > end:
                raise DeadlineExceeded("an answer to the last courier has not ended in time")
        self._lose_drains()  # again: a report of its progress may have come after its end
        for job in [job for job in list(self._jobs.values()) if job.is_sent]:
            self.fail_later(job)
        if not self.trainer.slots.wait_until_ended(self._config.timeout_s, self._is_over):
            raise DeadlineExceeded("a slot is still being filled")
        self._is_unused = True  # slots that are filled from now on belong to the next courier

    def fail_later(self, job: PendingCall) -> None:
        """Turn a save of the last courier into one that fails, for the next courier. Other jobs stay as they are."""
        if self._is_unused or job.method != "commit" or self.trainer is None:
            return
        request = job.answers.request
        if not request.lease and request.problem is not None:  # that was done, or it has failed already
            return
        with contextlib.suppress(DeadlineExceeded):  # a device still writes: no save gets that file
            job.answers.cancel_deferred()
        job.was_filled = request.problem is None
        request.fail(SaveFailed("its courier has ended", step=request.step))
        self.trainer.slots.forget(lambda taker: taker is request)

    def _is_over(self, taker: object) -> bool:
        """Whether a save has ended whose slots the last courier still had, or of which it was never told."""
        posted = [getattr(job.answers, "request", None) for job in list(self._jobs.values())]
        return isinstance(taker, SaveRequest) and all(taker is not request for request in posted)

    def come_up(self) -> None:
        """Introduce this Checkpointer to the next courier. Collective over its ranks."""
        if self._name in self._connection.couriers.freed:
            self._note_freed()
        if self.is_closed or self._is_freed or self.start is None or self._starting is None:
            return
        self._connection.send_first(self._opened())
        if not self._starting.woken.is_set():  # its constructor waits for that, perhaps for other ranks
            self._send_again()
            # it has its MPI, and answers
            self._ask(self._connection.send_first, "tell_doing", ("",), self._config.timeout_s)
            return
        end = time.monotonic() + self._config.timeout_s
        while not self._has_trainer.wait(_POLL_S):  # its constructor makes that
            if self.is_closed or time.monotonic() > end:
                return
        assert self.trainer is not None
        start = dataclasses.replace(
            self.start, ended_step=self._ended_step, interrupted=self._interrupted_scope, goes_on=True
        )
        for method, args in (("start", (start,)), ("protect_left", ())):
            job = self.job(method, *args)
            self._connection.send_first(job)
            if not job.woken.wait(self._config.timeout_s + _ANSWER_S) or job.late is not None:
                raise DeadlineExceeded("the next courier has not started in time")
            if job.error is not None:
                raise job.error
            if method == "start":
                self._failed_scope = max(self._failed_scope, job.result.interrupted)
                self.trainer.sharing, self.trainer.is_unprotected = job.result.sharing, False
                self.trainer.slots.update(job.result.files)
            elif method == "protect_left":
                self._find_committed(*job.result)
        self._send_again()

    def _send_again(self) -> None:
        """Send the jobs that are kept, which the last courier has not ended."""
        self._is_down = False
        for job in [job for job in list(self._jobs.values()) if job.is_sent]:
            job.is_sent = False
            self._connection.send_first(job)

    def _find_committed(self, step: int | None, generation: int) -> None:
        """Complete a save that was committed when its courier ended, so that the courier could not report it."""
        for job in list(self._jobs.values()):
            is_there = job.was_filled and job.answers.request.step == step
            if is_there and generation > self._generation:
                self._jobs.pop(job.number)
                self._ended_step = step
                job.answers.ended(None)
                job.woken.set()
        self._generation = max(self._generation, generation)

    def _lose_drains(self) -> None:
        if self.trainer is not None:
            self._drains_lost()

    def _refuse(self, job: PendingCall, why: str = "mlflash stopped after an earlier error") -> None:
        self.refuse(job, Closed(why, found=self.broken))

    def refuse(self, job: PendingCall, why: MlflashError) -> None:
        """End a job that no courier will do."""
        if not job.woken.is_set() and job.on_refused is not None:
            job.on_refused(why)
        self._jobs.pop(job.number, None)
        job.sent.set()
        job.end(job.error or why)


class _HasClient(Protocol):
    _courier: Client


_Me = TypeVar("_Me", bound=_HasClient)
_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


def restart_scope(method: Callable[Concatenate[_Me, _Takes], _Gives]) -> Callable[Concatenate[_Me, _Takes], _Gives]:
    """Put all jobs that a method posts into one scope; see `Client.restart_scope`."""

    @functools.wraps(method)
    def wrapper(self: _Me, /, *args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
        with self._courier.restart_scope():
            return method(self, *args, **kwargs)

    return wrapper
