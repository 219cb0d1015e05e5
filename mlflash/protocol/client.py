"""The interface through which a trainer reaches its courier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import DeadlineExceeded, MlflashError


class Client(Protocol):
    """The courier, as its trainer sees it."""

    @property
    def late(self) -> DeadlineExceeded | None:
        """The error of the job that has passed its deadline and still runs."""

    @property
    def broken(self) -> BaseException | None:
        """Why the courier has stopped working; None while it works."""

    @property
    def is_a(self) -> str:
        """Which process it is, where it runs, and how the ranks met."""

    @property
    def is_stuck(self) -> bool:
        """Whether a job has passed its deadline, or the courier has stopped working."""

    def post(self, job: Any) -> None:
        """Post a job made by `job`. Collective.

        A job that is posted twice is done once: who is interrupted by an exception of a signal handler posts it again.
        """

    def job(self, method: str, *args: Any, answers: Any = None,
            on_late: Callable[[DeadlineExceeded], None] | None = None,
            on_refused: Callable[[MlflashError], None] | None = None) -> Any:  # fmt: skip
        """Make a job for `post`: a call of a method of `courier.session.Session`.

        Args:
            answers: what the courier may ask in the meantime, if the method says so.
            on_late: called when the deadline has passed.
            on_refused: called if the courier does not do the job because of an earlier error.
        """

    def wait_sent(self, job: Any) -> None:
        """Wait until the courier has a posted job, not until it is done: then it does not depend on this process."""

    def unit(self) -> AbstractContextManager[None]:
        """Put all calls of this thread in the ``with`` block into one unit: no rank does half of it.

        Collective: all ranks do the same units in the same order. If couriers are started anew on any rank during a
        unit, its calls raise Closed on all ranks.
        """

    def call(self, method: str, *args: Any, answers: Any = None) -> Any:
        """Post a job and wait for its result. Collective.

        Raises:
            DeadlineExceeded: naming the ranks waited for.
            Closed: the courier has stopped working.
            MlflashError: on all ranks, as the method says.
        """

    def exchange(self, attempt: Any, homes: Any, files: Any, asked: Any) -> bool:
        """Call `RestoreSession.exchange`, in rounds of limited size. Collective."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method that is no job and is answered at once."""

    def tell_doing(self, what: str) -> None:
        """Tell the courier what this rank does, for ranks that wait for it; "" at its end."""

    def stop(self, abandon: bool) -> None:
        """End the courier, after the posted jobs or, with ``abandon``, at once."""

    def leave(self) -> None:
        """Do nothing in a forked process: the courier belongs to the parent."""


class _HasUnits(Protocol):
    def _unit(self) -> AbstractContextManager[None]: ...


_Me = TypeVar("_Me", bound=_HasUnits)
_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


def one_unit(method: Callable[Concatenate[_Me, _Takes], _Gives]) -> Callable[Concatenate[_Me, _Takes], _Gives]:
    """Make all calls of a method one unit, see `Client.unit`. The method `_unit` of its object makes the unit."""

    @functools.wraps(method)
    def whole(self: _Me, /, *args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
        with self._unit():
            return method(self, *args, **kwargs)

    return whole
