"""The trainer's side of a courier.

One thread sends, one receives. For each Checkpointer another thread answers the courier's questions and processes the
ends of jobs, in the order in which the courier sends them. No thread calls MPI, and each acts only on messages.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec

from ..config import Config
from ..draining.drain import Drain, Drains
from ..errors import Closed, ConfigError, DeadlineExceeded, DrainFailed, MlflashError, SaveFailed, text_of
from ..events import Event
from ..protocol import messages as asked
from ..protocol.messages import Message
from ..protocol.save_request import SaveRequest
from ..protocol.trainer_context import TrainerContext
from ..redundancy.deduplication import Plan
from . import wire_format as wire
from .courier_link import CourierLink
from .exchange_rounds import exchange
from .remote_job import RemoteJob, Sent
from .units import Units
from .wire_format import BadMessage, DrainWire, Frame, Kind, Outcome, PlanWire

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
    """Takes messages to the courier: see `protocol.client.Client`."""

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
        self.start: asked.Start | None = None  # how this Checkpointer was introduced to its courier
        self._jobs: dict[int, RemoteJob] = {}
        self._units = Units()
        self._asked: dict[int, tuple[Event, list[Frame]]] = {}
        self._plans = ToldPlans(link.number)
        self.drain = ToldDrain(config)
        self._frames: queue.SimpleQueue[Frame | Event | None] = queue.SimpleQueue()
        self.ranks, self._before = ranks, link.add(self.number, self, ranks)
        self._name = f"{zlib.crc32(repr(ranks).encode()):08x}-{self._before}"  # the same on all ranks
        self._over = Event()
        threading.Thread(target=self._answer, name="mlflash-courier", daemon=True).start()
        threading.Thread(target=self._watch, name="mlflash-deadline", daemon=True).start()
        self._link.queue.put(self._opened())

    def _opened(self) -> Sent:
        opened = wire.Opened(wire.VERSION, self._config, log.getEffectiveLevel(), self.ranks, self._before)
        try:
            wire.decode(wire.Opened, body := wire.encode(opened))
        # At the courier it would end the saving of all Checkpointers of this process.
        except (BadMessage, TypeError, OverflowError) as error:
            raise ConfigError("a setting is not of its type", found=text_of(error)) from None
        return Sent(wire.pack(Kind.OPEN, self.number, 0, "Opened", body))

    @property
    def is_stuck(self) -> bool:
        return self.late is not None or self.broken is not None

    @property
    def is_a(self) -> str:
        return self._link.is_a

    # Jobs

    def post(self, job: RemoteJob) -> None:
        self._link.queue.put(job)

    def job(self, message: Message, answers: Any = None, on_late: Callable[[DeadlineExceeded], None] | None = None,
            on_refused: Callable[[MlflashError], None] | None = None) -> RemoteJob:  # fmt: skip
        number = self._link.number()
        made = RemoteJob(self, lambda: self._frame(message, number), number, answers, on_late, on_refused)
        made.is_commit = isinstance(message, asked.Commit)
        made.is_kept = isinstance(message, (asked.Commit, asked.Free))
        if isinstance(message, asked.Free):
            self._free = made
        return self._expect(made)

    def _expect(self, job: RemoteJob) -> RemoteJob:
        job.unit = self._units.number
        self._jobs[job.number] = job
        return job

    def wait_sent(self, job: RemoteJob) -> None:
        job.sent.wait(_ANSWER_S)

    def unit(self) -> AbstractContextManager[None]:
        return self._units.unit()

    def call(self, message: Message, answers: Any = None) -> Any:
        with self._units.unit(joins=True):
            if isinstance(message, asked.Exchange):
                assert self.trainer is not None
                return exchange(message, self.trainer.ranks, self._exchange_some)
            return self._call(self.job(message, answers))

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

    def _frame(self, message: Message, number: int) -> Sent:
        name, before = type(message).__name__, b""
        body: Any = message
        if isinstance(message, (asked.Commit, asked.CommitRestored)):
            request = message.request
            restores = message.restores if isinstance(message, asked.CommitRestored) else 0
            plan, told = self._plans.number_of(request.plan)
            if told is not None:
                before = wire.pack(Kind.TELL, self.number, 0, "plan", wire.encode(told))
            body = wire.save_wire(request, plan, restores)
        if self.broken is not None:
            raise Closed("mlflash stopped after an earlier error", found=self.broken)
        return Sent(before + wire.pack(Kind.POST, self.number, number, name, wire.encode(body)))

    def _exchange_some(self, body: wire.ExchangeWire, fd: int) -> bool:
        number = self._link.number()
        sent = Sent(wire.pack(Kind.POST, self.number, number, "Exchange", wire.encode(body)), (fd,))
        return bool(self._call(self._expect(RemoteJob(self, lambda: sent, number, None, None, None))))

    # Questions and notices outside of jobs

    def ask(self, message: Message) -> Any:
        return wire.result_of(self._wait_for_answer(Kind.ASK, type(message).__name__, message, _ANSWER_S))

    def _wait_for_answer(self, kind: Kind, name: str, body: object, timeout_s: float) -> Frame:
        number = self._link.number()
        woken, answers = self._asked[number] = (Event(), [])
        try:
            self._link.queue.put(Sent(wire.pack(kind, self.number, number, name, wire.encode(body)), is_kept=True))
            end = time.monotonic() + timeout_s
            self._link.check()
            while not woken.wait(_LOOK_S):
                self._link.check()
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"the courier of this rank did not answer for {timeout_s:g} s")
            return answers[0]
        finally:
            del self._asked[number]

    def tell_doing(self, what: str) -> None:
        self._tell(Kind.TELL, 0, "doing", what)

    def stop(self, abandon: bool) -> None:
        patience_s = _CLOSE_S if abandon or self._is_freed else self._config.timeout_s  # freed: it is idle or dead
        with suppress(Closed, DeadlineExceeded):
            self._wait_for_answer(Kind.CLOSE, "Close", abandon, patience_s)
        self.is_closed = True  # its report can still be read
        self._frames.put(None)
        self._over.set()

    def leave(self) -> None:
        self.late, self.broken = DeadlineExceeded(FORKED), Closed(FORKED)

    def _tell(self, kind: Kind, number: int, name: str, body: object) -> None:
        self._link.queue.put(Sent(wire.pack(kind, self.number, number, name, wire.encode(body))))

    # Frames from the courier

    def take(self, frame: Frame) -> None:
        if frame.kind is Kind.LATE:
            error, late = wire.decode(MlflashError, frame.body), self._jobs.get(frame.number)
            if late is not None and isinstance(error, DeadlineExceeded):
                self.late = error
                late.be_late(error)
        elif frame.kind is Kind.ANSWER:
            woken, answers = self._asked.get(frame.number, (Event(), []))
            answers.append(frame)
            woken.set()
        elif frame.kind is Kind.QUESTION and self.is_closed:  # a save that an exception left is still under way
            gone = Closed("this Checkpointer was closed")
            self._tell(Kind.REPLY, frame.number, frame.name, Outcome(gone, False, wire.NOTHING))
        elif frame.kind in (Kind.DONE, Kind.QUESTION, Kind.EVENT):
            self._frames.put(frame)
        else:
            raise BadMessage(f"a frame of kind {frame.kind}, which couriers do not send")

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
            self._wait_for_answer(Kind.ASK, "RunFacts", asked.RunFacts(), _ANSWER_S)  # it answers, even with an error
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
                if frame.kind is Kind.DONE:
                    self._done(frame)
                elif frame.kind is Kind.QUESTION:
                    self._reply(frame)
                else:
                    self._event(frame)
            except Exception as error:
                log.exception("a message of the courier could not be processed")
                self.lose(Closed("a message of this rank's courier could not be processed", found=text_of(error)))

    def _done(self, frame: Frame) -> None:
        if (job := self._jobs.pop(frame.number, None)) is None and self._link.is_closing:
            return  # it has just been refused
        if job is None:
            raise BadMessage(f"the end of job {frame.number}, which does not exist")
        outcome: Outcome = wire.decode(Outcome, frame.body)
        if outcome.refused and job.on_refused is not None and outcome.error is not None:
            job.on_refused(outcome.error)
        self.late, job.error = None, outcome.error
        if job.is_commit and job.answers is not None:
            self._left_at = job.answers.request.step
        if outcome.error is None:
            job.result = wire.result_of(frame)
            self._generation = job.result if job.is_commit else self._generation
            if job is self._free:
                self._note_freed()
        job.woken.set()

    def _reply(self, frame: Frame) -> None:
        number, raw = wire.decode(tuple[int, bytes], frame.body)
        values = wire.decode(wire.known(wire.QUESTIONS, frame.name)[0], raw)
        result: Any = None
        error: MlflashError | None = None
        try:
            asked: Any = self.trainer if frame.name == "prepare" else self._jobs[number].answers
            result = getattr(asked, frame.name)(*values)
            if frame.name == "lay_out":
                told = self._plans.tell(result)
                self._link.send_first(Sent(wire.pack(Kind.TELL, self.number, 0, "plan", wire.encode(told))))
                result = told.number, result.manifest_nbytes
            elif frame.name == "finish_deferred":
                result = (result[0], tuple(result[1].items()))
            elif frame.name == "stage":
                result = (result[0], tuple(result[1].items()), asked.later is not None)
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # from torch, a device or an adapter
            error = SaveFailed(f"the state could not be copied: {text_of(problem)}")
        outcome = Outcome(error, False, msgspec.Raw(wire.encode(result)))
        # Who asks waits for it, also a courier that is still coming up, for which the queue is held back.
        self._link.send_first(Sent(wire.pack(Kind.REPLY, self.number, frame.number, frame.name, wire.encode(outcome))))

    def _event(self, frame: Frame) -> None:
        value = wire.decode(wire.known(wire.EVENTS, frame.name), frame.body)
        if frame.name == "broken":
            self.broken = None if self._is_down else value
        elif frame.name == "drain":
            self.drain.take(value)
        elif frame.name in ("ended", "begin_deferred", "handed_over"):
            job = self._jobs.get(frame.number)
            if job is not None and job.answers is not None:
                getattr(job.answers, frame.name)(*(value or ()))
        elif self.trainer is not None:
            getattr(self.trainer, frame.name)(value)

    def _note_freed(self) -> None:
        """Note that all ranks are done with this Checkpointer, no matter how couriers end, if `Free` was posted."""
        if self._free is not None and not self._is_freed:
            self._is_freed = True
            self._link.freed.append(self._name)
            self._jobs.pop(self._free.number, None)
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
        self._jobs.pop(job.number, None)

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
        for job in [job for job in list(self._jobs.values()) if job.is_sent and not job.is_kept]:
            self._refuse(job, f"{_ANEW}: {why}")

    def check(self, job: RemoteJob) -> None:
        """Raise Closed if a job belongs to a unit that another rank cannot continue; see `units`."""
        if self._units.has_failed(job.unit) and not job.is_kept:
            raise Closed(_ANEW)

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
        if not self.trainer.slots.wait_until_given(self._config.timeout_s, self._is_over):
            raise DeadlineExceeded("a slot is still being filled")
        self._is_unused = True  # slots that are filled from now on belong to the next courier

    def fail_later(self, job: RemoteJob) -> None:
        """Turn a save of the last courier into one that fails, for the next courier."""
        if not self._is_unused and job.make_fail() and self.trainer is not None:
            self.trainer.slots.reclaim(lambda taker: taker is job.request)

    def _is_over(self, taker: object) -> bool:
        """Whether a save has ended whose slots the last courier still had, or of which it was never told."""
        return isinstance(taker, SaveRequest) and all(taker is not job.request for job in list(self._jobs.values()))

    def come_up(self) -> None:
        """Introduce this Checkpointer to the next courier. Collective over its ranks."""
        if self._name in self._link.couriers.freed:
            self._note_freed()
        if self.is_closed or self._is_freed or self.start is None or self.trainer is None:
            return
        self._plans.forget()
        self._link.send_first(self._opened())
        start = dataclasses.replace(
            self.start, left_at=self._left_at, interrupted=self._units.interrupted, goes_on=True
        )
        for message in (start, asked.GoBeyond(), asked.ProtectLeft()):
            job = self.job(message)
            self._link.send_first(job)
            if not job.woken.wait(self._config.timeout_s + _ANSWER_S) or job.late is not None:
                raise DeadlineExceeded("the next courier has not started in time")
            if job.error is not None:
                raise job.error
            if isinstance(message, asked.Start):
                self._units.fail(job.result.interrupted)
                self.trainer.sharing, self.trainer.is_unhealed = job.result.sharing, False
                self.trainer.slots.update(job.result.files)
            elif isinstance(message, asked.ProtectLeft):
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
                self._jobs.pop(job.number)
                self._left_at = step
                job.answers.ended(None)
                job.woken.set()
        self._generation = max(self._generation, generation)

    def _refuse(self, job: RemoteJob, why: str = "mlflash stopped after an earlier error") -> None:
        job.refuse(Closed(why, found=self.broken))


# What one side has told the other


class ToldDrain:
    """The newest drain, from the reports of the courier; ``drains`` is told of each that begins."""

    drains: Drains

    def __init__(self, config: Config):
        self._config = config
        self._number, self._drain = 0, None  # type: tuple[int, Drain | None]

    def take(self, told: DrainWire) -> None:
        """Process a report of its progress."""
        drain = self._drain
        if drain is None or told.number != self._number:
            drain = Drain(told.step, patience_s=self._config.timeout_s)
            self._number, self._drain = told.number, drain
            self.drains.began(drain)
        drain.path, drain.nbytes, drain.written = told.path, told.nbytes, told.written
        drain.progress, drain.moved, drain.silent = told.progress, told.moved, told.silent
        if told.done:
            drain.end(told.error)
            drain.seconds = told.seconds

    def lose(self) -> None:
        """Fail the drain, because its courier has ended. The next courier counts its drains from one again."""
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done:
            drain.end(DrainFailed("the courier of this rank has ended", step=drain.step))


class ToldPlans:
    """The last plan that was sent to the courier, so that saves refer to it by number."""

    def __init__(self, number: Callable[[], int]):
        self._number = number
        self._last: tuple[int, Plan] | None = None

    def forget(self) -> None:
        """Note that there is a new courier, which knows no plan."""
        self._last = None

    def number_of(self, plan: Plan | None) -> tuple[int, PlanWire | None]:
        """The number of a plan (-1 for None), and the plan itself if the courier must be told of it first."""
        if plan is None:
            return -1, None
        if self._last is not None:
            number, known = self._last
            same = known.layout is plan.layout and known.pieces is plan.pieces
            if same and (known.sharing, known.private) == (plan.sharing, plan.private):
                return number, None
        told = self.tell(plan)
        return told.number, told

    def tell(self, plan: Plan) -> PlanWire:
        """The message that tells the courier of a plan, with a new number."""
        self._last = self._number(), plan
        return PlanWire(self._last[0], dataclasses.replace(plan, manifest=b""))
