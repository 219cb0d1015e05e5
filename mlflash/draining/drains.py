"""The drains of this run, as the trainer sees them: it asks for drains, and waits for them."""

from __future__ import annotations

from ..errors import DeadlineExceeded, DrainFailed, MlflashError
from ..protocol.client import Client
from ..protocol.messages import AskDrain, BeginDrain, GiveUpDrain
from ..protocol.ranks import Ranks
from .drain import Drain


class Drains:
    """The drains of this rank.

    Args:
        courier: runs them.
        ranks: the ranks of this run.
        has_directory: whether there is a directory to drain to.

    Attributes:
        last: the newest drain, running or ended; None before the first.
        restored: the step that was restored last; None before the first.
    """

    def __init__(self, courier: Client, ranks: Ranks, has_directory: bool):
        self._courier, self._ranks, self._has_directory = courier, ranks, has_directory
        self.last: Drain | None = None
        self.restored: int | None = None

    @property
    def idle(self) -> bool:
        """Whether no drain is running on this rank."""
        return self.last is None or self.last.done

    def began(self, drain: Drain) -> None:
        """Note a drain that begins."""
        self.last = drain

    def ask(self) -> None:
        """Ask for a drain of the next checkpoint that is committed; agreed on with the commit."""
        self._courier.ask(AskDrain())

    def drain(self) -> Drain:
        """Drain the newest checkpoint; see `Checkpointer.drain`."""
        if not self._has_directory:
            raise DrainFailed("this Checkpointer has no directory to drain to")
        self.settle()
        self._courier.call(BeginDrain(if_due=False))
        assert self.last is not None
        return self.last

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no drain is running; see `Checkpointer.wait_drained`."""
        if self.last is None or self.last.done:
            return
        try:
            self.last.wait(timeout_s)
        except DeadlineExceeded as error:
            error.rank, error.node = self._ranks.rank, self._ranks.node_name
            raise
        except MlflashError:
            pass  # a warning was logged already

    def settle(self) -> None:
        """Wait on all ranks until no drain is running. Collective over the world.

        A rank that waited in vain, and then left out the next collective call, would make another one than the others.

        Raises:
            DeadlineExceeded: on all ranks, if some rank still drains.
        """
        if self._has_directory:
            self._ranks.on_all(self.wait)

    def finish(self) -> None:
        """Drain the newest checkpoint, if draining is on and that is not done yet, and wait. Collective over the world.

        A drain that fails is a warning.
        """
        if not self._has_directory:
            return
        try:
            self.settle()
            self._courier.call(BeginDrain(if_due=True))
            self.settle()
        except DrainFailed:
            pass  # a warning was logged already

    @property
    def drained(self) -> int | None:
        """The step of the newest drain, if that has ended well."""
        return self.last.step if self.last is not None and self.last.done and self.last.error is None else None

    def lacks(self, step: int | None) -> bool:
        """Whether this run has saved a step, its newest, that is not in the directory."""
        return self._has_directory and step not in (None, self.restored, self.drained)

    def give_up(self) -> None:
        """Make a running drain end soon, and have what it wrote deleted."""
        if not self.idle:
            self._courier.ask(GiveUpDrain())
