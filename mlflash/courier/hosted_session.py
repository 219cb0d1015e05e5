"""A session in a courier: the thread that does its jobs, and the reports about them to the trainer."""

from __future__ import annotations

import functools
import logging
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from ..draining.drain import Drain
from ..errors import Closed, MlflashError, text_of
from ..events import Event
from ..mpi.job_thread import Job, JobThread
from ..mpi.world import World
from ..protocol import messages as asked
from ..protocol.messages import FoundInMemory, Message
from ..protocol.save_request import SaveRequest
from ..protocol.wanted_parts import WantedPart
from ..redundancy.deduplication import Plan
from . import wire_format as wire
from .remote_trainer import Link, RemoteAnswers, RemoteTrainer
from .session import Session
from .wire_format import BadMessage, Frame, Kind, Outcome

log = logging.getLogger("mlflash")

ORPHAN_S = 4.0  # limit for posted jobs to end after their trainer; see `zygote.ENDS_S`
_TOLD_S = 0.05  # shortest time between two reports of a drain's progress
_PLANS = 3  # older plans to keep, in addition to the newest


class Hosted:
    """A session, and the thread that does its jobs.

    Args:
        comm: of all ranks of the job; None if there is one rank.
        before: earlier sessions. This one starts when those with its slots have ended.

    Raises:
        BadMessage: its ranks are not ranks of the job, or this rank is not among them.
    """

    def __init__(self, number: int, link: Link, opened: wire.Opened, comm: Any, before: Iterable[Hosted] = ()):
        self.number, self._link = number, link
        config, (rank, size) = opened.config, (0, 1) if comm is None else (comm.rank, comm.size)
        self._slots = config.memory, config.job
        self.is_closed, self.has_ended = False, Event()
        self._before = [one for one in before if one.is_closed and one._slots == self._slots]
        ranks = set(opened.ranks)
        if len(ranks) != len(opened.ranks) or rank not in ranks or not ranks <= {*range(size)}:
            raise BadMessage(f"a session of the ranks {str(opened.ranks)[:80]} to rank {rank} of {size}")
        # Each session has its own communicators from the start, so the other sessions of these ranks do not matter.
        self.world = World(comm, config.here, config.timeout_s, opened.ranks, f"{opened.before}")
        self.jobs = JobThread(self.world)
        self.session = Session(config, self.world, self.jobs, self._drain_began, trains_on=link.trains_on)
        self._plans: dict[int, Plan] = {}
        self._drains = 0
        self._posted = self._done = 0  # jobs
        self._ending = threading.Condition()

    def post(self, frame: Frame, files: deque[int]) -> None:
        """Post a job from the trainer."""
        body = wire.decode(wire.known(wire.MESSAGES, frame.name), frame.body)
        message, answers, landing = self._message(body, frame, files)
        self._posted += 1
        work = functools.partial(self._do, message, answers, landing)
        late = functools.partial(self._link.send, Kind.LATE, self.number, frame.number, frame.name)
        self.jobs.post(Job(work, late, functools.partial(self._told, frame)))

    def _message(self, body: Any, frame: Frame, files: deque[int]) -> tuple[Message, Any, Landing | None]:
        if isinstance(body, wire.SaveWire):
            request = self._request(body)
            answers = RemoteAnswers(self._link, self.number, self.world, frame.number, request, self.plan_of)
            commit = frame.name == "Commit"
            return asked.Commit(request) if commit else asked.CommitRestored(request, body.restores), answers, None
        if isinstance(body, wire.ExchangeWire):
            if not files:
                raise BadMessage("an exchange without a file")
            landing = Landing(files.popleft(), body)
            return asked.Exchange(body.attempt, body.homes, body.files, landing.asked), None, landing
        if isinstance(body, asked.SettleShared):
            return body, RemoteAnswers(self._link, self.number, self.world, frame.number, None, self.plan_of), None
        if not isinstance(body, Message):
            raise BadMessage(f"{frame.name}, which is no job")
        return body, None, None

    def _request(self, body: wire.SaveWire) -> SaveRequest:
        fields = {name: getattr(body, name) for name in body.__dataclass_fields__ if name not in (
            "plan", "manifest_nbytes", "checks", "restores", "problem")}  # fmt: skip
        request = SaveRequest(**fields, checks=dict(body.checks), filled_s=time.perf_counter())
        request.problem = body.problem
        request.plan = None if body.plan < 0 else self.plan_of(body.plan, body.manifest_nbytes)
        return request

    def plan_of(self, number: int, manifest_nbytes: int) -> Plan:
        """The plan with a number, for a manifest of ``manifest_nbytes``."""
        if number not in self._plans:
            raise BadMessage(f"plan {number}, which does not exist")
        known = self._plans[number]
        return Plan(known.layout, b"", known.private, known.sharing, known.pieces, manifest_nbytes)

    def _do(self, message: Message, answers: Any, landing: Landing | None) -> Any:
        try:
            if isinstance(message, asked.Start):  # what an exception has left is given some time to end
                self.world.wait_for(lambda: all(one.has_ended.is_set() for one in self._before))
                self._before = []
            result = self.session.handle(message, answers)
            if isinstance(message, asked.Start):
                self.session.attach(RemoteTrainer(self._link, self.number, self.world))
            return result
        finally:
            if landing is not None:
                landing.close()

    def _told(self, frame: Frame, job: Job) -> None:
        if self.jobs.broken is not None and not job.is_refused:
            broken = Closed("the courier of this rank failed", found=text_of(self.jobs.broken))
            self._link.send(Kind.EVENT, self.number, 0, "broken", broken)
        self._link.send(
            Kind.DONE, self.number, frame.number, frame.name, _outcome(job.result, job.error, job.is_refused)
        )
        with self._ending:
            self._done += 1
            self._ending.notify_all()

    def finish(self, end: float) -> None:
        """Wait until the jobs posted so far have ended, or until ``end`` (time.monotonic)."""
        with self._ending:
            self._ending.wait_for(lambda: self._done >= self._posted, max(0.0, end - time.monotonic()))

    def answer(self, frame: Frame) -> None:
        """Answer a question that is not a job."""
        message = wire.decode(wire.known(wire.MESSAGES, frame.name), frame.body)
        result: Any = None
        error: BaseException | None = None
        try:
            result = self.session.answer(message)
        except Exception as problem:  # in any case the trainer waits for an answer
            error = problem
        self._link.send(Kind.ANSWER, self.number, frame.number, frame.name, _outcome(result, error, False))

    def told(self, frame: Frame) -> None:
        """Process a notice from the trainer."""
        value = wire.decode(wire.known(wire.TELLS, frame.name), frame.body)
        if frame.name == "plan":
            self._plans = {**dict([*self._plans.items()][-_PLANS:]), value.number: value.plan}
        else:
            self.session.tell_doing(value)

    def close(self, frame: Frame) -> None:
        """End the jobs and release memory.

        If an exception left the Checkpointer, answer first, so that the trainer does not wait. The posted jobs then
        have up to `ORPHAN_S` to end.
        """
        abandon = wire.decode(bool, frame.body)
        closed = functools.partial(self._link.send, Kind.ANSWER, self.number, frame.number, frame.name)
        try:
            if abandon:
                closed(_outcome(None, None, False))
                self.finish(time.monotonic() + ORPHAN_S)
            self.jobs.stop(abandon)
            self.session.close(abandon)
        finally:
            self.has_ended.set()
        if not abandon:
            closed(_outcome(None, None, False))

    def _drain_began(self, drain: Drain) -> None:
        self._drains += 1
        number, told_at = self._drains, [0.0]

        def tell() -> None:
            now = time.monotonic()
            if drain.done or now - told_at[0] > _TOLD_S:
                told_at[0] = now
                state = wire.DrainWire(
                    number, drain.step, drain.path, drain.nbytes, drain.written, drain.progress, drain.moved,
                    (tuple(drain.silent[0]), drain.silent[1]), drain.seconds, drain.error, drain.done,
                )  # fmt: skip
                self._link.send(Kind.EVENT, self.number, 0, "drain", state)

        drain.told = tell
        tell()


class Landing:
    """A file for parts from other ranks, which the trainer also maps."""

    def __init__(self, fd: int, body: wire.ExchangeWire):
        self._fd = fd
        size = os.fstat(fd).st_size
        parts = [part for those in body.asked.values() for part in those]
        if any(part.at < 0 or part.nbytes < 0 or part.at + part.nbytes > size for part in parts):
            raise BadMessage("a part that goes beyond its file")
        self._view = np.frombuffer(mmap.mmap(fd, size) if size else b"", np.uint8)
        self.asked = {rank: [self._wanted(part) for part in those] for rank, those in body.asked.items()}

    def _wanted(self, part: wire.PartWire) -> WantedPart:
        raw = self._view[part.at : part.at + part.nbytes]
        target = raw.reshape(*part.shape, part.nbytes // max(1, math.prod(part.shape)))
        return WantedPart(part.rank, part.number, part.source, part.shape, target)

    def close(self) -> None:
        self.asked, self._view = {}, np.empty(0, np.uint8)
        os.close(self._fd)


def _outcome(result: Any, error: BaseException | None, refused: bool) -> Outcome:
    if isinstance(result, FoundInMemory):
        result = wire.FoundWire(result, None)
    elif hasattr(result, "folder"):
        result = wire.FoundWire(None, result)
    if error is not None and not isinstance(error, MlflashError):
        error = Closed(f"the courier failed: {text_of(error)}")
    try:
        encoded = wire.encode(result if error is None else None)
        if len(encoded) > wire.LARGEST_NBYTES // 2:
            raise OverflowError(f"{len(encoded)} bytes")
    except (TypeError, ValueError, OverflowError) as problem:  # such as file names that are not UTF-8
        encoded, error = wire.encode(None), MlflashError(f"the result of a job cannot be sent: {text_of(problem)}")
    return Outcome(error, refused, msgspec.Raw(encoded))
