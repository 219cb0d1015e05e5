"""The courier as a process of its own, as its trainer sees it.

One thread sends what is posted, one receives, and one for each Checkpointer answers the courier's questions and hears
how jobs end, in the order in which the courier says so. None of them calls MPI, or does anything but at a message.
"""

from __future__ import annotations

import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..config import Config
from ..draining.drain import Drain
from ..draining.drains import Drains
from ..errors import Closed, DeadlineExceeded, DrainFailed, MlflashError, SaveFailed, text_of
from ..mpi.courier import FORKED
from ..protocol import messages as asked
from ..protocol.client import Pace
from ..protocol.messages import Exchange, Message
from ..protocol.save_request import SaveRequest
from ..protocol.trainer_context import TrainerContext
from ..redundancy.slot_plan import Plan
from . import wire_format as wire
from .courier_link import CourierLink, RemoteJob, Sent
from .exchange_rounds import Landing, rounds
from .wire_format import BadMessage, Frame, Kind, Outcome

log = logging.getLogger("mlflash")

_GRACE_S = 10.0  # how long after a deadline its error may take to arrive
_ANSWER_S = 10.0  # for what is asked beside the jobs
_CLOSE_S = 3.0  # for a session that is abandoned to be closed
_LOOK_S = 0.2
_NOTHING = b"\xc0"  # None, encoded


class CourierProcess:
    """Takes messages to the process: see `protocol.client.Client`.

    Args:
        link: to it.
        config: of the job.
    """

    def __init__(self, link: CourierLink, config: Config):
        self._link, self._config, self.number = link, config, link.number()
        self.late: DeadlineExceeded | None = None
        self.broken: BaseException | None = None
        self.is_closed = False
        self.trainer: TrainerContext | None = None
        self.drains: Drains | None = None
        self._jobs: dict[int, RemoteJob] = {}
        self._asked: dict[int, tuple[threading.Event, list[Frame]]] = {}
        self._plan: tuple[int, Plan | None] = (-1, None)
        self._drain: tuple[int, Drain | None] = (0, None)
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        link.sessions[self.number] = self
        threading.Thread(target=self._answer, name="mlflash-courier", daemon=True).start()
        self._tell(Kind.OPEN, 0, "Opened", wire.Opened(wire.VERSION, config, log.getEffectiveLevel()))

    @property
    def is_stuck(self) -> bool:
        return self.late is not None or self.broken is not None

    @property
    def pace(self) -> Pace:
        return self

    def step(self) -> None:
        self._tell(Kind.TELL, 0, "step", None)

    def stalled(self, seconds: float) -> None:
        if self._config.max_slowdown:
            self._tell(Kind.TELL, 0, "stalled", seconds)

    # Jobs

    @property
    def post(self) -> Callable[[Any], None]:
        return self._link.queue.put

    def job(self, message: Message, answers: Any = None, on_late: Callable[[DeadlineExceeded], None] | None = None,
            on_refused: Callable[[MlflashError], None] | None = None) -> RemoteJob:  # fmt: skip
        number = self._link.number()
        made = RemoteJob(lambda: self._frame(message, number), number, answers, on_late, on_refused)
        self._jobs[number] = made
        return made

    def wait_sent(self, job: RemoteJob) -> None:
        """Wait until the courier has a job that was posted: it is done whatever becomes of this process."""
        job.sent.wait(_ANSWER_S)

    def call(self, message: Message, answers: Any = None) -> Any:
        if isinstance(message, Exchange):
            return self._exchange(message)
        return self._call(self.job(message, answers))

    def _call(self, job: RemoteJob) -> Any:
        end = time.monotonic() + self._config.timeout_s + _GRACE_S
        self.post(job)
        if self.broken is not None:
            self._refuse(job)
        while not job.woken.wait(_LOOK_S):
            if time.monotonic() > end and (self.late is not None or self.broken is not None):
                break  # else an earlier job has the floor, and its own deadline runs
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
            plan, before = self._number_plan(request.plan)
            body = _save_wire(request, plan, restores)
        if self.broken is not None:
            raise Closed("mlflash stopped after an earlier error", found=self.broken)
        return Sent(before + wire.pack(Kind.POST, self.number, number, name, wire.encode(body)))

    def _number_plan(self, plan: Plan | None) -> tuple[int, bytes]:
        """The number by which the courier knows a plan; and the frame that tells it, where it does not yet."""
        if plan is None:
            return -1, b""
        number, known = self._plan
        if known is not None and known.layout is plan.layout and (
            (known.sharing, known.private) == (plan.sharing, plan.private) and known.pieces is plan.pieces
        ):  # fmt: skip
            return number, b""
        told = self._plan_wire(plan)
        return told.number, wire.pack(Kind.TELL, self.number, 0, "plan", wire.encode(told))

    def _plan_wire(self, plan: Plan) -> wire.PlanWire:
        self._plan = (self._link.number(), plan)
        without = Plan(plan.layout, b"", plan.private, plan.sharing, plan.pieces, plan.manifest_nbytes)
        return wire.PlanWire(self._plan[0], without)

    # What other ranks send

    def _exchange(self, message: Exchange) -> bool:
        """Get parts from other ranks, so much at a time as the file has room for that both processes see."""
        assert self.trainer is not None
        mine = [*rounds(message.asked)]
        most = -self.trainer.ranks.agree([-len(mine)])[0]
        if not most:
            return True
        good = True
        landing = Landing(max((sum(part.target.nbytes for _, part in those) for those in mine), default=0))
        try:
            for those in [*mine, *([] for _ in range(most - len(mine)))]:
                body = wire.ExchangeWire(message.attempt, message.homes, message.files, landing.places(those))
                number = self._link.number()
                sent = Sent(wire.pack(Kind.POST, self.number, number, "Exchange", wire.encode(body)), (landing.fd,))
                job = self._jobs[number] = RemoteJob(functools.partial(_same, sent), number, None, None, None)
                good &= self._call(job)
                landing.take(those)
        finally:
            landing.close()
        return good

    # Beside the jobs

    def ask(self, message: Message) -> Any:
        return _result(self._wait_for_answer(Kind.ASK, type(message).__name__, message, _ANSWER_S))

    def _wait_for_answer(self, kind: Kind, name: str, body: object, timeout_s: float) -> Frame:
        number = self._link.number()
        woken, answers = self._asked[number] = (threading.Event(), [])
        try:
            self._tell(kind, number, name, body)
            end = time.monotonic() + timeout_s
            while not woken.wait(_LOOK_S):
                if self._link.lost:
                    raise Closed("the courier of this rank has ended", found=self._link.lost)
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"the courier of this rank did not answer for {timeout_s:g} s")
            return answers[0]
        finally:
            del self._asked[number]

    def go_on_behind(self) -> None:
        """The courier does so itself."""

    def stop(self, abandon: bool) -> None:
        try:
            self._wait_for_answer(Kind.CLOSE, "Close", abandon, _CLOSE_S if abandon else self._config.timeout_s)
        except (Closed, DeadlineExceeded) as error:
            log.debug("the courier did not say that it has closed: %s", error)
        self.is_closed = True  # it can still be asked for its report
        self._frames.put(None)

    def leave(self) -> None:
        self.late, self.broken = DeadlineExceeded(FORKED), Closed(FORKED)

    def _tell(self, kind: Kind, number: int, name: str, body: object) -> None:
        self._link.queue.put(Sent(wire.pack(kind, self.number, number, name, wire.encode(body))))

    # What the courier sends

    def take(self, frame: Frame) -> None:
        """Take a frame in; on the thread that receives."""
        if frame.kind is Kind.LATE:
            self._note_late(frame)
        elif frame.kind is Kind.ANSWER:
            woken, answers = self._asked.get(frame.number, (threading.Event(), []))
            answers.append(frame)
            woken.set()
        elif frame.kind in (Kind.DONE, Kind.QUESTION, Kind.EVENT):
            self._frames.put(frame)
        else:
            raise BadMessage(f"a courier sends no frame of kind {frame.kind}")

    def _note_late(self, frame: Frame) -> None:
        error = wire.decode(MlflashError, frame.body)
        job = self._jobs.get(frame.number)
        if job is None or not isinstance(error, DeadlineExceeded):
            return
        self.late = job.late = error
        if job.on_late is not None:
            job.on_late(error)
        job.woken.set()

    def _answer(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                if frame.kind is Kind.DONE:
                    self._done(frame)
                elif frame.kind is Kind.QUESTION:
                    self._reply(frame)
                else:
                    self._event(frame)
            except Exception as error:
                log.exception("what the courier sent was not understood")
                self.lose(text_of(error))

    def _done(self, frame: Frame) -> None:
        job = self._jobs.pop(frame.number, None)
        if job is None:
            raise BadMessage(f"there is no job {frame.number}")
        outcome: Outcome = wire.decode(Outcome, frame.body)
        if outcome.refused and job.on_refused is not None and outcome.error is not None:
            job.on_refused(outcome.error)
        self.late, job.error = None, outcome.error
        if outcome.error is None:
            job.result = _result(frame)
        job.woken.set()

    def _reply(self, frame: Frame) -> None:
        takes, _ = wire.known(wire.QUESTIONS, frame.name)
        number, raw = wire.decode(tuple[int, bytes], frame.body)
        values = wire.decode(takes, raw)
        result: Any = None
        error: MlflashError | None = None
        try:
            if frame.name == "prepare":
                assert self.trainer is not None
                result = self.trainer.prepare(*values)
            else:
                result = getattr(self._jobs[number].answers, frame.name)(*values)
                if frame.name == "lay_out":
                    told = self._plan_wire(result)
                    self._tell(Kind.TELL, 0, "plan", told)
                    result = told.number, result.manifest_nbytes
                elif frame.name == "stage":
                    result = (result[0], tuple(result[1].items()))
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # of torch, a device or an adapter
            log.debug("the answer to %s failed", frame.name, exc_info=True)
            error = SaveFailed(f"the state could not be copied: {text_of(problem)}")
        outcome = Outcome(error, False, msgspec.Raw(wire.encode(result)))
        self._tell(Kind.REPLY, frame.number, frame.name, outcome)

    def _event(self, frame: Frame) -> None:
        value = wire.decode(wire.known(wire.EVENTS, frame.name), frame.body)
        if frame.name == "broken":
            self.broken = value
        elif frame.name == "drain":
            self._note_drain(value)
        elif frame.name in ("ended", "begin_deferred"):
            job = self._jobs.get(frame.number)
            if job is not None and job.answers is not None:
                getattr(job.answers, frame.name)(*(value or ()))
        elif self.trainer is not None:
            getattr(self.trainer, frame.name)(value)

    def _note_drain(self, told: wire.DrainWire) -> None:
        number, drain = self._drain
        if drain is None or told.number != number:
            drain = Drain(told.step, self._refuse_broken, self._config.timeout_s)
            self._drain = (told.number, drain)
            assert self.drains is not None
            self.drains.began(drain)
        drain.path, drain.nbytes, drain.written = told.path, told.nbytes, told.written
        drain.progress, drain.moved, drain.silent = told.progress, told.moved, told.silent
        if told.done:
            drain.end(told.error)
            drain.seconds = told.seconds

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise DrainFailed("mlflash stopped after an earlier error", found=self.broken)

    def lose(self, why: str) -> None:
        """Let nobody wait for a courier that has ended."""
        if self.is_closed:
            return
        if self.broken is None:
            self.broken = Closed("the courier of this rank has ended", found=why)
            if not sys.is_finalizing():
                log.warning("nothing is saved any more: the courier of this rank (pid %d) has ended: %s",
                            self._link.pid, why)  # fmt: skip
        for job in list(self._jobs.values()):
            self._refuse(job)

    def _refuse(self, job: RemoteJob) -> None:
        self._jobs.pop(job.number, None)
        job.refuse(Closed("mlflash stopped after an earlier error", found=self.broken))


def _same(sent: Sent) -> Sent:
    return sent


def _result(frame: Frame) -> Any:
    outcome: Outcome = wire.decode(Outcome, frame.body)
    if outcome.error is not None:
        raise outcome.error
    if frame.name not in wire.RESULTS:
        return None
    result = wire.decode(wire.RESULTS[frame.name], outcome.result) if bytes(outcome.result) != _NOTHING else None
    return (result.in_memory or result.in_directory) if isinstance(result, wire.FoundWire) else result


def _save_wire(request: SaveRequest, plan: int, restores: int) -> wire.SaveWire:
    nbytes = 0 if request.plan is None else request.plan.manifest_nbytes
    return wire.SaveWire(
        request.step, request.problem, request.skip, request.slot, request.share, request.files, request.inode, plan,
        nbytes, tuple(request.checks.items()), request.is_unsettled, request.waits_for_room, request.has_deferred,
        request.begun_s, restores,
    )  # fmt: skip
