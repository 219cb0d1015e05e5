"""The courier as a thread of the trainer's process. It gets the message objects themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..errors import DeadlineExceeded, MlflashError
from ..mpi.job_thread import Job, JobThread
from ..protocol.messages import Message
from .session import Session


class CourierThread:
    """Takes messages to the thread: see `protocol.client.Client`. ``why``: it is not a process."""

    def __init__(self, jobs: JobThread, session: Session, why: str):
        self._jobs, self.session, self.is_a = jobs, session, f"thread ({why})"

    @property
    def late(self) -> DeadlineExceeded | None:
        return self._jobs.late

    @property
    def broken(self) -> BaseException | None:
        return self._jobs.broken

    @property
    def is_stuck(self) -> bool:
        return self._jobs.is_stuck

    def post(self, job: Job) -> None:
        self._jobs.post(job)

    def job(self, message: Message, answers: Any = None, on_late: Callable[[DeadlineExceeded], None] | None = None,
            on_refused: Callable[[MlflashError], None] | None = None) -> Job:  # fmt: skip
        return Job(lambda: self.session.handle(message, answers), on_late, on_refused)

    def wait_sent(self, job: Job) -> None:
        pass  # it is a thread of this process and ends with it

    def unit(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # the courier only ends with this process

    def call(self, message: Message, answers: Any = None) -> Any:
        return self._jobs.call(lambda: self.session.handle(message, answers))

    def ask(self, message: Message) -> Any:
        return self.session.answer(message)

    def tell_doing(self, what: str) -> None:
        self.session.tell_doing(what)

    def stop(self, abandon: bool) -> None:
        self._jobs.stop(abandon)
        self.session.close(abandon)

    def leave(self) -> None:
        self._jobs.leave()
        self.session.context.recorder.leave()
