"""What a Checkpointer gives to its courier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import DeadlineExceeded, MlflashError, SaveFailed
from ..events import Event
from ..protocol.save_request import SaveRequest
from .channel import Call, Reply

if TYPE_CHECKING:
    from .in_process import CourierProcess


@dataclasses.dataclass
class Sent:
    """A frame on its way to the channel."""

    frame: Call | Reply
    is_kept: bool = False  # sent to the next courier if this one has ended


class RemoteJob:
    """A job for the courier; see `mpi.job_thread.Job`."""

    def __init__(self, session: CourierProcess, call: Call, answers: Any,
                 on_late: Callable[[DeadlineExceeded], None] | None,
                 on_refused: Callable[[MlflashError], None] | None):  # fmt: skip
        self.session, self.call, self.answers = session, call, answers
        self.fds: tuple[int, ...] = ()  # descriptors that go with it
        self.on_late, self.on_refused = on_late, on_refused
        # is_kept: whether the next courier does it if this one ends in the middle of it
        self.is_sent = self.is_commit = self.is_kept = self.was_staged = False
        self.unit = 0  # the unit it belongs to; 0: none
        self.sent = Event()
        self.woken = Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.late: DeadlineExceeded | None = None

    @property
    def request(self) -> SaveRequest | None:
        """The request, if the job is a save; None otherwise."""
        return getattr(self.answers, "request", None)

    def make_fail(self) -> bool:
        """Turn a save that the last courier knew into one that fails on the next. Return whether it was not one yet."""
        request = self.request
        assert request is not None
        if not request.lease and request.problem is not None:
            return False
        try:
            self.answers.cancel_deferred()
        except DeadlineExceeded:
            pass  # a device still writes: no save gets that file
        self.was_staged = request.problem is None
        request.problem = request.problem or SaveFailed("its courier has ended", step=request.step)
        request.lease, request.plan = 0, None
        request.is_unsettled = request.waits_for_room = request.skip = request.has_deferred = False
        return True

    def be_late(self, error: DeadlineExceeded) -> None:
        """Note that the courier has passed its deadline and still works."""
        self.late = error
        if self.on_late is not None:
            self.on_late(error)
        self.woken.set()

    def refuse(self, why: MlflashError) -> None:
        """Note that the courier will not do it."""
        if not self.woken.is_set() and self.on_refused is not None:
            self.on_refused(why)
        self.session.forget(self)
        self.error = self.error or why
        self.sent.set()
        self.woken.set()
