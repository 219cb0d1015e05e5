"""What `drain` returns at once: how far the drain is, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..channel.ranks import Ranks
from ..config import Config
from ..errors import DeadlineExceeded, DrainFailed, MlflashError
from ..events import Event
from ..memory.slot import Attempt
from ..storage.store import Store
from .index import RankFiles

if TYPE_CHECKING:
    from ..channel.client import Client

_NAP_S = 0.02


class Drain:
    """A running or ended drain.

    Attributes:
        step: the training step of the checkpoint.
        path: the folder; "" before it has a name.
        nbytes: bytes of this rank's files; 0 before they are laid out.
        written: bytes of them written so far.
        seconds: how long the drain took; None while it runs.
        error: why it failed; None if it has not failed.
    """

    def __init__(self, step: int, check: Callable[[], None] = lambda: None, patience_s: float = float("inf")):
        self.step = step
        self._check = check  # called again and again while somebody waits
        self._patience_s = patience_s
        self.path = ""
        self.nbytes = self.written = 0
        self.seconds: float | None = None
        self.error: MlflashError | None = None
        self.progress = 0  # grows while this rank makes progress
        self.inside: Store | None = None  # the folder; None before it has a name
        self.stored: dict[int, RankFiles] = {}  # written by this rank, by the rank whose state it is
        self.attempt: Attempt | None = None
        self.moved = time.monotonic()  # when any rank last made progress
        # the ranks that do not answer while no rank makes progress, as numbers and in words
        self.silent: tuple[tuple[int, ...], str] = ((), "")
        self.given_up = Event()
        # called when a rank has made progress, when ranks do not answer, and at the end
        self.on_change: Callable[[], None] = lambda: None
        self._start = time.perf_counter()
        self._ended = Event()

    @property
    def done(self) -> bool:
        """Whether the drain has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Drain:
        """Wait until the checkpoint is in the directory.

        Not collective.

        Args:
            timeout: seconds. None: wait as long as some rank makes progress.

        Returns:
            The drain itself.

        Raises:
            DrainFailed: the checkpoint was not written to the directory; earlier checkpoints there are untouched.
            DeadlineExceeded: it is not in the directory yet, or no rank made progress for the Checkpointer's
                ``timeout_s``.
        """
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(max(0.0, min(_NAP_S, end - time.monotonic()))):
            self._check()
            now = time.monotonic()
            if now - self.moved > self._patience_s:
                raise self._late(f"no rank made progress for {self._patience_s:g} s")
            if now >= end:
                raise self._late(f"it takes longer than {timeout:g} s")
        if self.error is not None:
            raise self.error
        return self

    def _late(self, why: str) -> DeadlineExceeded:
        ranks, names = self.silent
        who = f"; {names} does not answer" if ranks else ""
        return DeadlineExceeded(f"the drain of this step has not ended: {why}{who} (it may still end)", step=self.step,
                                ranks=ranks)  # fmt: skip

    def note_progress(self) -> None:
        self.moved, self.silent = time.monotonic(), ((), "")
        self.on_change()

    def note_silent(self, ranks: Sequence[int], names: str) -> None:
        """Note the ranks that do not answer, as numbers and in words."""
        self.silent = tuple(ranks), names
        self.on_change()

    def end(self, error: MlflashError | None) -> None:
        self.error, self.seconds = error, time.perf_counter() - self._start
        self._ended.set()
        self.on_change()


# The drains of this run, as the trainer sees them: it asks for drains, and waits for them.


class Drains:
    """The drains of this rank."""

    def __init__(self, courier: Client, ranks: Ranks, config: Config):
        self._courier, self._ranks, self._config = courier, ranks, config
        self._has_directory = config.directory is not None
        self.last: Drain | None = None
        self._number = 0  # the courier's number of it; 0: none, or that courier has ended
        self.restored: int | None = None  # the step that was restored last; None before the first

    @property
    def idle(self) -> bool:
        return self.last is None or self.last.done

    def moved(self, number: int, state: Mapping[str, Any]) -> None:
        """Note how far the drain is that the courier has numbered so; a new number: it has just begun."""
        drain = self.last
        if drain is None or number != self._number:
            self.last = drain = Drain(state["step"], patience_s=self._config.timeout_s)
            self._number = number
        for name in ("path", "nbytes", "written", "progress", "moved", "silent"):
            setattr(drain, name, state[name])
        if state["done"]:
            drain.end(state["error"])
            drain.seconds = state["seconds"]

    def lost(self) -> None:
        """Fail the drain, because its courier has ended. The next courier counts its drains from one again."""
        self._number = 0
        if self.last is not None and not self.last.done:
            self.last.end(DrainFailed("the courier of this rank has ended", step=self.last.step))

    def ask(self) -> None:
        """Ask for a drain of the next checkpoint that is committed; agreed on with the commit."""
        self._courier.ask("ask_drain")

    def drain(self) -> Drain:
        """Drain the newest checkpoint; see `Checkpointer.drain`."""
        if not self._has_directory:
            raise DrainFailed("this Checkpointer has no directory to drain to")
        self.settle()
        self._courier.call("begin_drain", False)
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
        """Drain the newest checkpoint, if draining is on and that is not done yet, and wait. Collective."""
        if not self._has_directory:
            return
        try:
            self.settle()
            self._courier.call("begin_drain", True)
            self.settle()
        except DrainFailed:
            pass  # a warning was logged already

    @property
    def drained(self) -> int | None:
        """The step of the newest drain, if that has ended well."""
        return self.last.step if self.last is not None and self.last.done and self.last.error is None else None

    def lacks(self, step: int | None) -> bool:
        return self._has_directory and step not in (None, self.restored, self.drained)

    def give_up(self) -> None:
        """Make a running drain end soon, and have what it wrote deleted."""
        if not self.idle:
            self._courier.ask("give_up_drain")
