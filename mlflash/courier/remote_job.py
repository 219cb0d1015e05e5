"""What a Checkpointer has its courier do, and what the connection to it wants of a Checkpointer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import Closed, DeadlineExceeded, MlflashError, SaveFailed
from ..protocol.save_request import SaveRequest
from .wire_format import Frame


@dataclasses.dataclass
class Sent:
    """A frame on its way to the socket."""

    packed: bytes
    fds: tuple[int, ...] = ()
    is_kept: bool = False  # for the next courier, where this one has ended


class RemoteJob:
    """A job that the courier does; see `mpi.job_thread.Job`.

    Attributes:
        is_kept: whether the next courier does it, where this one ends in the middle of it.
    """

    def __init__(self, session: Session, frame: Callable[[], Sent], number: int, answers: Any,
                 on_late: Callable[[DeadlineExceeded], None] | None,
                 on_refused: Callable[[MlflashError], None] | None):  # fmt: skip
        self.session, self.frame, self.number, self.answers = session, frame, number, answers
        self.on_late, self.on_refused = on_late, on_refused
        self.is_sent = self.is_commit = self.is_kept = self.was_staged = False
        self.unit = 0  # that it belongs to; 0: none
        self.sent = threading.Event()
        self.woken = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.late: DeadlineExceeded | None = None

    @property
    def request(self) -> SaveRequest | None:
        """Of the save that it is; None: it is none."""
        return getattr(self.answers, "request", None)

    def make_fail(self) -> bool:
        """Make a save that one courier had been told of one that fails, for the next; whether it was not so before."""
        request = self.request
        assert request is not None
        if request.slot is None and request.share is None and request.problem is not None:
            return False
        try:
            self.answers.cancel_deferred()
        except DeadlineExceeded:
            pass  # a device is still at it: that file is given to nobody
        self.was_staged = request.problem is None
        request.problem = request.problem or SaveFailed("its courier has ended", step=request.step)
        request.slot = request.share = request.plan = None
        request.is_unsettled = request.waits_for_room = request.skip = request.has_deferred = False
        return True

    def be_late(self, error: DeadlineExceeded) -> None:
        """Hear that the courier is past its deadline, and still at it."""
        self.late = error
        if self.on_late is not None:
            self.on_late(error)
        self.woken.set()

    def refuse(self, why: MlflashError) -> None:
        """Say that the courier will not do it."""
        if not self.woken.is_set() and self.on_refused is not None:
            self.on_refused(why)
        self.session.forget(self)
        self.error = self.error or why
        self.sent.set()
        self.woken.set()


class Session(Protocol):
    """A Checkpointer that has this connection.

    Attributes:
        ranks: of the job, those that have it.
    """

    ranks: tuple[int, ...]

    def take(self, frame: Frame) -> None:
        """Take a frame in; on the thread that receives."""

    def lose(self, why: Closed) -> None:
        """Let nobody wait for a courier that has ended, and has no successor."""

    def forget(self, job: RemoteJob) -> None:
        """Wait no more for an answer to a job, and let go what its save holds."""

    def wait_done(self, timeout_s: float) -> None:
        """Wait until all that the courier was told to do has ended, or for so many seconds."""

    def go_down(self, pid: int, why: str) -> None:
        """Let what is on its way fail: the courier is going to be another one. May be called twice."""

    def wait_unused(self) -> None:
        """Wait until nothing is done any more for the last courier, and no slot is being filled.

        Raises:
            DeadlineExceeded: it is not so in time.
        """

    def check(self, job: RemoteJob) -> None:
        """Raise Closed where a job belongs to what another rank cannot go on with; see `units`."""

    def fail_later(self, job: RemoteJob) -> None:
        """Make a save of the last courier one that fails, for the next one."""

    def come_up(self) -> None:
        """Introduce this Checkpointer to the next courier. Collective over its ranks."""
