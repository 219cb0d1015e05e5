"""A session in a courier: the thread that does its jobs, and the reports about them to the trainer."""

from __future__ import annotations

import functools
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..config import Config
from ..draining.drain import Drain
from ..errors import Closed, MlflashError, text_of
from ..events import Event
from ..mpi.job_thread import Job, JobThread
from ..mpi.world import World
from ..protocol.save_request import SaveRequest
from ..protocol.wanted_parts import WantedPart
from .channel import Broken, Call, Reply
from .exchange_rounds import Part
from .remote_trainer import Link, RemoteAnswers, RemoteTrainer
from .session import Session

log = logging.getLogger("mlflash")

ORPHAN_S = 4.0  # limit for posted jobs to end after their trainer; see `zygote.ENDS_S`
_TOLD_S = 0.05  # shortest time between two reports of a drain's progress
_TOLD_OF_DRAIN = ("step", "path", "nbytes", "written", "progress", "moved", "silent", "seconds", "error", "done")


class Hosted:
    """A session, and the thread that does its jobs.

    Args:
        comm: of all ranks of these couriers; None if there is one rank.
        before: earlier sessions. This one starts when those with its slots have ended.
        ranks: those that have this Checkpointer, in its order.
        earlier: how many Checkpointers these ranks have had before.

    Raises:
        Broken: its ranks are not ranks of these couriers, or this rank is not among them.
    """

    def __init__(self, number: int, link: Link, comm: Any, before: Iterable[Hosted], config: Config,
                 ranks: tuple[int, ...], earlier: int):  # fmt: skip
        self.number, self._link = number, link
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._slots = config.memory, config.job
        self.is_closed, self.has_ended = False, Event()
        self._before = [one for one in before if one.is_closed and one._slots == self._slots]
        if len({*ranks}) != len(ranks) or rank not in ranks or not {*ranks} <= {*range(size)}:
            raise Broken(f"a session of the ranks {str(ranks)[:80]} for rank {rank} of {size}")
        # Each session has its own communicators from the start, so the other sessions of these ranks do not matter.
        self.world = World(comm, config.here, config.timeout_s, ranks, f"{earlier}")
        self.jobs = JobThread(self.world)
        self.session = Session(config, self.world, self.jobs, self._drain_began, trains_on=link.trains_on)
        self._drains = 0
        self._posted = self._done = 0  # jobs
        self._ending = threading.Condition()

    def take(self, call: Call) -> None:
        """Do what the trainer calls: post a job, or answer at once."""
        if call.method == "close":
            self.is_closed = True
            threading.Thread(target=self._close, args=(call, *call.args), name="mlflash-close", daemon=True).start()
        elif call.job:
            self._post(call)
        else:
            self._answer(call)

    def _post(self, call: Call) -> None:
        args, landing = call.args, None
        if call.method in Session.ASK_BACK:
            request = args[0] if isinstance(args[0], SaveRequest) else None
            args = (*args, RemoteAnswers(self._link, self.number, self.world, call.number, request))
        elif call.method == "exchange":
            *others, asked = args
            landing = Landing(self._link.channel.descriptors.popleft(), asked)
            args = (*others, landing.asked)
        self._posted += 1
        work = functools.partial(self._do, call.method, args, landing)
        late = lambda error: self._link.send(Call(self.number, 0, "late", (call.number, error)))
        self.jobs.post(Job(work, late, functools.partial(self._told, call)))

    def _do(self, method: str, args: tuple[Any, ...], landing: Landing | None) -> Any:
        try:
            if method == "start":  # what an exception has left is given some time to end
                self.world.wait_for(lambda: all(one.has_ended.is_set() for one in self._before))
                self._before = []
            result = self.session.do(method, args)
            if method == "start":
                self.session.attach(RemoteTrainer(self._link, self.number, self.world))
            return result
        finally:
            if landing is not None:
                landing.close()

    def _told(self, call: Call, job: Job) -> None:
        if self.jobs.broken is not None and not job.is_refused:
            broken = Closed("the courier of this rank failed", found=text_of(self.jobs.broken))
            self._link.send(Call(self.number, 0, "broke", (broken,)))
        self._reply(call, job.result, job.error, job.is_refused)
        with self._ending:
            self._done += 1
            self._ending.notify_all()

    def finish(self, end: float) -> None:
        """Wait until the jobs posted so far have ended, or until ``end`` (time.monotonic)."""
        with self._ending:
            self._ending.wait_for(lambda: self._done >= self._posted, max(0.0, end - time.monotonic()))

    def _answer(self, call: Call) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = getattr(self.session, call.method)(*call.args)
        except Exception as problem:  # in any case the trainer waits for an answer
            error = problem
        if call.number:
            self._reply(call, result, error)

    def _reply(self, call: Call, result: Any, error: BaseException | None, refused: bool = False) -> None:
        if error is not None and not isinstance(error, MlflashError):
            error = Closed(f"the courier failed: {text_of(error)}")
        self._link.send(Reply(self.number, call.number, None if error is not None else result, error, refused))

    def _close(self, call: Call, abandon: bool) -> None:
        """End the jobs and release memory.

        If an exception left the Checkpointer, answer first, so that the trainer does not wait. The posted jobs then
        have up to `ORPHAN_S` to end.
        """
        try:
            if abandon:
                self._reply(call, None, None)
                self.finish(time.monotonic() + ORPHAN_S)
            self.jobs.stop(abandon)
            self.session.end(abandon)
        finally:
            self.has_ended.set()
        if not abandon:
            self._reply(call, None, None)

    def _drain_began(self, drain: Drain) -> None:
        self._drains += 1
        number, told_at = self._drains, [0.0]

        def tell() -> None:
            now = time.monotonic()
            if drain.done or now - told_at[0] > _TOLD_S:
                told_at[0] = now
                state = {name: getattr(drain, name) for name in _TOLD_OF_DRAIN}
                self._link.send(Call(self.number, 0, "drain_moved", (number, state)))

        drain.told = tell
        tell()


class Landing:
    """A file for parts from other ranks, which the trainer also maps."""

    def __init__(self, fd: int, asked: Mapping[int, Sequence[Part]]):
        self._fd = fd
        size = os.fstat(fd).st_size
        self._view = np.frombuffer(mmap.mmap(fd, size) if size else b"", np.uint8)
        self.asked = {rank: [self._wanted(part) for part in parts] for rank, parts in asked.items()}

    def _wanted(self, part: Part) -> WantedPart:
        raw = self._view[part.at : part.at + part.nbytes]
        target = raw.reshape(*part.shape, part.nbytes // max(1, math.prod(part.shape)))
        return WantedPart(part.rank, part.number, part.source, part.shape, target)

    def close(self) -> None:
        self.asked, self._view = {}, np.empty(0, np.uint8)
        os.close(self._fd)
