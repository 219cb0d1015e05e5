"""The trainer's side of its courier.

One thread sends, one receives. For each Checkpointer another thread answers the courier's questions and processes the
ends of jobs, in the order in which the courier sends them. No thread calls MPI, and each acts only on what comes.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from ..config import Config
from ..draining.drain import Drain, Drains
from ..errors import Closed, DeadlineExceeded, DrainFailed, MlflashError, SaveFailed, text_of
from ..events import Event
from ..memory.own_slots import SlotFile
from ..protocol.records import Start
from ..protocol.save_request import SaveRequest
from ..protocol.trainer_context import TrainerContext
from ..version import __version__
from .channel import Call, Reply
from .courier_link import CourierLink
from .exchange_rounds import Part, exchange
from .remote_job import RemoteJob, Sent
from .units import Units

log = logging.getLogger("mlflash")

FORKED = (
    "this process was forked from the one that made this Checkpointer, which does not work here: save and restore in "
    "the parent"
)
_ANEW = "the couriers of this run were started anew during this call"
_ANSWER_S = 10.0  # limit for answers outside of jobs, and for an error after its deadline
_CLOSE_S = 3.0  # limit to close a session that is abandoned or has no courier any more
_LOOK_S = 0.2
_WATCH_S = 1.0  # time between two looks for a job that is late


class CourierProcess:
    """Calls methods of a session of the courier: see `protocol.client.Client`."""

    def __init__(self, link: CourierLink, config: Config, ranks: tuple[int, ...]):
        self._link, self._config, self.number = link, config, link.number()
        self.late: DeadlineExceeded | None = None
        self.broken: BaseException | None = None
        self.is_closed = self._is_down = self._is_unused = False
        self._free: RemoteJob | None = None  # the last job of a session
        self._is_freed = False  # freed on all ranks: if a courier ends now, nothing is lost
        self._left_at: int | None = None  # the newest step whose save has ended
        self._generation = 0  # generation of the newest attempt that has ended
        self.trainer: TrainerContext | None = None
        self.start: Start | None = None  # how this Checkpointer was introduced to its courier
        self._jobs: dict[int, RemoteJob] = {}
        self._units = Units()
        self._asked: dict[int, tuple[Event, list[Reply]]] = {}
        self.drain = ToldDrain(config)
        self._frames: queue.SimpleQueue[Call | Reply | Event | None] = queue.SimpleQueue()
        self.ranks, self._before = ranks, link.add(self.number, self, ranks)
        self._name = f"{zlib.crc32(repr(ranks).encode()):08x}-{self._before}"  # the same on all ranks
        self._over = Event()
        threading.Thread(target=self._answer, name="mlflash-courier", daemon=True).start()
        threading.Thread(target=self._watch, name="mlflash-deadline", daemon=True).start()
        self._link.queue.put(self._opened())

    def _opened(self) -> Sent:
        args = (__version__, log.getEffectiveLevel(), self._config, self.ranks, self._before)
        return Sent(Call(self.number, 0, "open", args))

    @property
    def is_stuck(self) -> bool:
        return self.late is not None or self.broken is not None

    @property
    def is_a(self) -> str:
        return self._link.is_a

    # Jobs

    def post(self, job: RemoteJob) -> None:
        self._link.queue.put(job)

    def job(self, method: str, *args: Any, answers: Any = None,
            on_late: Callable[[DeadlineExceeded], None] | None = None,
            on_refused: Callable[[MlflashError], None] | None = None) -> RemoteJob:  # fmt: skip
        call = Call(self.number, self._link.number(), method, args, job=1)
        made = RemoteJob(self, call, answers, on_late, on_refused)
        made.is_commit = method == "commit"
        made.is_kept = method in ("commit", "free")
        if method == "free":
            self._free = made
        made.unit = self._units.number
        self._jobs[call.number] = made
        return made

    def wait_sent(self, job: RemoteJob) -> None:
        job.sent.wait(_ANSWER_S)

    def unit(self) -> AbstractContextManager[None]:
        return self._units.unit()

    def call(self, method: str, *args: Any, answers: Any = None) -> Any:
        with self._units.unit(joins=True):
            return self._call(self.job(method, *args, answers=answers))

    def exchange(self, attempt: Any, homes: Any, files: Any, asked: Any) -> bool:
        assert self.trainer is not None

        def some(parts: dict[int, list[Part]], fd: int) -> bool:
            job = self.job("exchange", attempt, homes, files, parts)
            job.fds = (fd,)
            return bool(self._call(job))

        with self._units.unit(joins=True):
            return exchange(asked, self.trainer.ranks, some)

    def _call(self, job: RemoteJob) -> Any:
        self.post(job)
        if self.broken is not None:
            self._refuse(job)
        end = time.monotonic() + self._config.timeout_s + _ANSWER_S
        while not job.woken.wait(_LOOK_S):
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

    def ask(self, method: str, *args: Any) -> Any:
        return self._wait_for_answer(method, args, _ANSWER_S)

    def _wait_for_answer(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        number = self._link.number()
        woken, answers = self._asked[number] = (Event(), [])
        try:
            self._link.queue.put(Sent(Call(self.number, number, method, args), is_kept=True))
            end = time.monotonic() + timeout_s
            self._link.check()
            while not woken.wait(_LOOK_S):
                self._link.check()
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"the courier of this rank did not answer for {timeout_s:g} s")
            return answers[0].value()
        finally:
            del self._asked[number]

    def lease(self, number: int, leave: bool, lent: Collection[int]) -> Sequence[SlotFile]:
        try:
            files: Sequence[SlotFile] = self._wait_for_answer("lease", (number, leave, lent), _ANSWER_S)
        except (Closed, DeadlineExceeded):  # who saves finds out why; the courier may still lease them
            self.release(number, ())
            return ()
        return files

    def release(self, number: int, given_up: Collection[int]) -> None:
        self._link.queue.put(Sent(Call(self.number, 0, "release", (number, given_up)), is_kept=True))

    def tell_doing(self, what: str) -> None:
        self._link.queue.put(Sent(Call(self.number, 0, "tell_doing", (what,))))

    def stop(self, abandon: bool) -> None:
        patience_s = _CLOSE_S if abandon or self._is_freed else self._config.timeout_s  # freed: it is idle or dead
        with suppress(Closed, DeadlineExceeded):
            self._wait_for_answer("close", (abandon,), patience_s)
        self.is_closed = True  # its report can still be read
        self._frames.put(None)
        self._over.set()

    def leave(self) -> None:
        self.late, self.broken = DeadlineExceeded(FORKED), Closed(FORKED)

    # What comes from the courier

    def take(self, frame: Call | Reply) -> None:
        """Take what has arrived; the thread that answers does what must be in order."""
        if isinstance(frame, Reply) and frame.number in self._asked:
            woken, answers = self._asked[frame.number]
            answers.append(frame)
            woken.set()
        elif isinstance(frame, Call) and frame.method == "late":
            number, error = frame.args
            if (late := self._jobs.get(number)) is not None:
                self.late = error
                late.be_late(error)
        elif isinstance(frame, Call) and frame.number and self.is_closed:
            gone = Closed("this Checkpointer was closed")  # a save that an exception left is still under way
            self._link.queue.put(Sent(Reply(self.number, frame.number, None, gone)))
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
                rank = self._link.couriers.rank
                node = None if self.trainer is None else self.trainer.ranks.node_name
                self.late = DeadlineExceeded(
                    f"waited {self._config.timeout_s:g} s, and the courier of this rank (pid {self._link.pid}) does "
                    "not answer: look whether it is stopped. The last committed step is untouched. When it goes on, "
                    "saves work again; if it does not, relaunch the job", rank=rank, node=node, ranks=[rank],
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
        self.late, job.error = None, reply.error
        if job.is_commit and job.answers is not None:
            self._left_at = job.answers.request.step
        if reply.error is None:
            job.result = reply.result
            self._generation = job.result if job.is_commit else self._generation
            if job is self._free:
                self._note_freed()
        job.woken.set()

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
        self._link.send_first(Sent(Reply(self.number, call.number, result, error)))

    def broke(self, error: MlflashError) -> None:
        """Note that the courier has stopped working."""
        self.broken = None if self._is_down else error

    def drain_moved(self, number: int, state: Mapping[str, Any]) -> None:
        self.drain.take(number, state)

    def _note_freed(self) -> None:
        """Note that all ranks are done with this Checkpointer, no matter how couriers end, if `Free` was posted."""
        if self._free is not None and not self._is_freed:
            self._is_freed = True
            self._link.freed.append(self._name)
            self._jobs.pop(self._free.call.number, None)
            self._free.woken.set()

    def lose(self, why: Closed) -> None:
        """End all waits for a courier that has ended and has no successor."""
        self._note_freed()  # if only `Free` was left: all saves have ended
        if self.is_closed or self._is_freed:
            return
        if self.start is not None or self.broken is None:  # it was not lost before
            is_meant = sys.is_finalizing() or self._link.is_closing or self._link.is_kept  # kept: the next round saves
            log.log(logging.DEBUG if is_meant else logging.WARNING, "nothing is saved any more: %s", why)
        self.broken, self.start = self.broken or why, None  # permanently
        self.drain.lose()
        for job in list(self._jobs.values()):
            self._refuse(job)

    def forget(self, job: RemoteJob) -> None:
        self._jobs.pop(job.call.number, None)

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
            self._units.interrupt()
            if self.trainer is not None:
                self.trainer.recorder.courier_died(pid, why)
            self.broken = None if self.start is not None else self.broken  # it failed because another one had ended
            self.drain.lose()
            for number, (woken, answers) in list(self._asked.items()):
                answers.append(Reply(self.number, number, None, Closed(_ANEW)))
                woken.set()
        for job in [job for job in list(self._jobs.values()) if job.is_sent and not job.is_kept]:
            self._refuse(job, f"{_ANEW}: {why}")

    def check(self, job: RemoteJob) -> None:
        """Raise Closed if the courier has stopped, or a job is of a unit that no rank may continue, see `units`."""
        if self._units.has_failed(job.unit) and not job.is_kept:
            raise Closed(_ANEW)
        if self.broken is not None:
            raise Closed("mlflash stopped after an earlier error", found=self.broken)

    def wait_unused(self) -> None:
        """Wait until nothing uses the last courier and no slot is being filled. Raises DeadlineExceeded."""
        if self.is_closed or self.trainer is None:
            return
        idle, end = Event(), time.monotonic() + self._config.timeout_s
        self._frames.put(idle)
        while not idle.wait(_LOOK_S):
            if self.is_closed:
                return
            if time.monotonic() > end:
                raise DeadlineExceeded("an answer to the last courier has not ended in time")
        self.drain.lose()  # again: a report of its progress may have come after its end
        for job in [job for job in list(self._jobs.values()) if job.is_sent and job.is_commit]:
            self.fail_later(job)
        if not self.trainer.slots.wait_until_ended(self._config.timeout_s, self._is_over):
            raise DeadlineExceeded("a slot is still being filled")
        self._is_unused = True  # slots that are filled from now on belong to the next courier

    def fail_later(self, job: RemoteJob) -> None:
        """Turn a save of the last courier into one that fails, for the next courier."""
        if not self._is_unused and job.make_fail() and self.trainer is not None:
            self.trainer.slots.forget(lambda taker: taker is job.request)

    def _is_over(self, taker: object) -> bool:
        """Whether a save has ended whose slots the last courier still had, or of which it was never told."""
        return isinstance(taker, SaveRequest) and all(taker is not job.request for job in list(self._jobs.values()))

    def come_up(self) -> None:
        """Introduce this Checkpointer to the next courier. Collective over its ranks."""
        if self._name in self._link.couriers.freed:
            self._note_freed()
        if self.is_closed or self._is_freed or self.start is None or self.trainer is None:
            return
        self._link.send_first(self._opened())
        start = dataclasses.replace(
            self.start, left_at=self._left_at, interrupted=self._units.interrupted, goes_on=True
        )
        for method, args in (("start", (start,)), ("go_beyond", ()), ("protect_left", ())):
            job = self.job(method, *args)
            self._link.send_first(job)
            if not job.woken.wait(self._config.timeout_s + _ANSWER_S) or job.late is not None:
                raise DeadlineExceeded("the next courier has not started in time")
            if job.error is not None:
                raise job.error
            if method == "start":
                self._units.fail(job.result.interrupted)
                self.trainer.sharing, self.trainer.is_unhealed = job.result.sharing, False
                self.trainer.slots.update(job.result.files)
            elif method == "protect_left":
                self._find_committed(*job.result)
        self._is_down = False
        for job in [job for job in list(self._jobs.values()) if job.is_sent]:  # kept jobs: send them again
            job.is_sent = False
            self._link.send_first(job)

    def _find_committed(self, step: int | None, generation: int) -> None:
        """Complete a save that was committed when its courier ended, so that the courier could not report it."""
        for job in list(self._jobs.values()):
            is_there = job.is_commit and job.was_staged and job.answers.request.step == step
            if is_there and generation > self._generation:
                self._jobs.pop(job.call.number)
                self._left_at = step
                job.answers.ended(None)
                job.woken.set()
        self._generation = max(self._generation, generation)

    def _refuse(self, job: RemoteJob, why: str = "mlflash stopped after an earlier error") -> None:
        job.refuse(Closed(why, found=self.broken))


class ToldDrain:
    """The newest drain, from the reports of the courier; ``drains`` is told of each that begins."""

    drains: Drains

    def __init__(self, config: Config):
        self._config = config
        self._number, self._drain = 0, None  # type: tuple[int, Drain | None]

    def take(self, number: int, state: Mapping[str, Any]) -> None:
        """Process a report of its progress."""
        drain = self._drain
        if drain is None or number != self._number:
            drain = Drain(state["step"], patience_s=self._config.timeout_s)
            self._number, self._drain = number, drain
            self.drains.began(drain)
        for name in ("path", "nbytes", "written", "progress", "moved", "silent"):
            setattr(drain, name, state[name])
        if state["done"]:
            drain.end(state["error"])
            drain.seconds = state["seconds"]

    def lose(self) -> None:
        """Fail the drain, because its courier has ended. The next courier counts its drains from one again."""
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done:
            drain.end(DrainFailed("the courier of this rank has ended", step=drain.step))
