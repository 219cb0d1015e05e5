"""How a trainer reaches its courier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import DeadlineExceeded, MlflashError
from .messages import Message


class Posted(Protocol):
    """A message that is on its way to the courier, or done."""


class Pace(Protocol):
    """What the courier is told of training, so that it slows it down as little as it may."""

    def step(self) -> None:
        """Note that training comes to a step's end."""

    def stalled(self, seconds: float) -> None:
        """Note that training waited in `save`."""


class Client(Protocol):
    """The courier, as its trainer sees it.

    Attributes:
        late: of the job that is past its deadline and not done; None: there is none.
        broken: why nothing is done any more; None: it is.
        pace: told of the steps of training.
        is_a: what it is, and why, or where: "thread (...)", "process (...)".
    """

    @property
    def late(self) -> DeadlineExceeded | None:
        """See above."""

    @property
    def broken(self) -> BaseException | None:
        """See above."""

    @property
    def pace(self) -> Pace:
        """See above."""

    @property
    def is_a(self) -> str:
        """See above."""

    @property
    def is_stuck(self) -> bool:
        """Whether a job does not end, or no more are done."""

    @property
    def post(self) -> Callable[[Any], None]:
        """Let a job that `job` gave be done; twice posted, it is done once. It is collective as its message is.

        Where the courier is a thread or a process, this gives a function that is written in C: no exception of a signal
        handler can come in the middle of it.
        """

    def job(self, message: Message, answers: Any = None, on_late: Callable[[DeadlineExceeded], None] | None = None,
            on_refused: Callable[[MlflashError], None] | None = None) -> Posted:  # fmt: skip
        """Make what `post` takes. Not collective.

        Args:
            message: what is asked.
            answers: what the courier may ask meanwhile, where the message says so.
            on_late: told when the deadline has passed.
            on_refused: told when the courier will not do it, after an earlier error.
        """

    def wait_sent(self, job: Any) -> None:
        """Wait until the courier has a job that was posted: it is done whatever becomes of this process.

        Not collective. It does not wait until it is done.
        """

    def unit(self) -> AbstractContextManager[None]:
        """Make one unit of all that this thread calls for meanwhile: no rank does half of it.

        Collective, in that all ranks do the same units in the same order. Where couriers are started anew in the
        middle of it on any rank, what is called for raises Closed on all.
        """

    def call(self, message: Message, answers: Any = None) -> Any:
        """Post a message and wait for what it gives; collective as the message is.

        Raises:
            DeadlineExceeded: naming the ranks waited for.
            Closed: the courier does nothing any more.
            MlflashError: on all ranks, as the message says.
        """

    def ask(self, message: Message) -> Any:
        """Ask at once, beside the jobs. Not collective."""

    def go_on_behind(self) -> None:
        """Advance what goes on beside the jobs, where nothing else does. Not collective."""

    def stop(self, abandon: bool) -> None:
        """End it: after the jobs posted so far, or at once, in the middle of whatever it does. Not collective."""

    def leave(self) -> None:
        """Do nothing in a process that was forked: the courier is the parent's. Not collective."""


class _HasUnits(Protocol):
    def _unit(self) -> AbstractContextManager[None]: ...


_Me = TypeVar("_Me", bound=_HasUnits)
_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


def one_unit(method: Callable[Concatenate[_Me, _Takes], _Gives]) -> Callable[Concatenate[_Me, _Takes], _Gives]:
    """Make all that a method calls for one unit, see `Client.unit`; its object says by `_unit` of which client."""

    @functools.wraps(method)
    def whole(self: _Me, /, *args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
        with self._unit():
            return method(self, *args, **kwargs)

    return whole
