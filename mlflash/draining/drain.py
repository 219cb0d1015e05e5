"""What `drain` returns at once: how far the drain is, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import DeadlineExceeded, MlflashError
from ..events import Event
from ..memory.slot_header import Attempt
from ..storage.store import Store
from .file_index import Stored

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
        inside: the folder; None before it has a name.
        stored: the files that this rank has written, by the rank whose state they contain.
        attempt: the save attempt that is drained; None before it is known.
        clean: whether the files that interrupted drains of earlier runs left were deleted (rank 0).
        progress: grows while this rank makes progress.
        moved: when any rank last made progress, by `time.monotonic`.
        silent: the ranks that do not answer while no rank makes progress, as numbers and in words.
    """

    def __init__(self, step: int, look: Callable[[], None] = lambda: None, patience_s: float = float("inf")):
        self.step = step
        self._look = look  # called again and again while somebody waits
        self._patience_s = patience_s
        self.path = ""
        self.nbytes = self.written = 0
        self.seconds: float | None = None
        self.error: MlflashError | None = None
        self.progress = 0
        self.inside: Store | None = None
        self.stored: dict[int, Stored] = {}
        self.attempt: Attempt | None = None
        self.clean = False
        self.moved = time.monotonic()
        self.silent: tuple[tuple[int, ...], str] = ((), "")
        self.given_up = Event()
        self.told: Callable[[], None] = lambda: None  # called when a rank has made progress, and at the end
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
            self._look()
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

    def moves(self) -> None:
        """Note that some rank made progress (for the courier)."""
        self.moved, self.silent = time.monotonic(), ((), "")
        self.told()

    def end(self, error: MlflashError | None) -> None:
        """Tell the waiters how it ended (for the courier)."""
        self.error, self.seconds = error, time.perf_counter() - self._start
        self._ended.set()
        self.told()
