"""What a drain returns at once: how far it is, and how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import DeadlineExceeded, MlflashError
from ..memory.slot_header import Attempt
from ..storage.store import Store
from .file_index import Stored

_NAP_S = 0.02


class Drain:
    """A drain on its way, and how it ended.

    Attributes:
        step: of the checkpoint.
        path: the folder; "" before it has a name.
        nbytes: bytes of this rank's files; 0 before they are laid out.
        written: bytes of them written so far.
        seconds: how long it took; None while it goes on.
        error: why it failed; None where it has not.
        inside: the folder; None before it has a name.
        stored: the files that this rank has written, by the rank whose state they have.
        attempt: what is drained; None before it is known.
        clean: whether what interrupted drains of earlier runs left was deleted (rank 0).
        progress: grows while this rank gets on.
        moved: when any rank last got on, by `time.monotonic`.
        silent: the ranks that do not answer while none gets on; and in words.
    """

    def __init__(self, step: int, look: Callable[[], None] = lambda: None, patience_s: float = float("inf")):
        self.step = step
        self._look = look  # done again and again while somebody waits
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
        self.given_up = threading.Event()
        self.told: Callable[[], None] = lambda: None  # done when some rank gets on, and at the end
        self._start = time.perf_counter()
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Drain:
        """Wait until the checkpoint is in the directory.

        Not collective.

        Args:
            timeout: seconds; None: for as long as some rank gets on.

        Returns:
            The drain itself.

        Raises:
            DrainFailed: it is not there; those that were there are untouched.
            DeadlineExceeded: it is not there yet, or no rank got on for the Checkpointer's ``timeout_s``.
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
        """Note that some rank got on (for the courier)."""
        self.moved, self.silent = time.monotonic(), ((), "")
        self.told()

    def end(self, error: MlflashError | None) -> None:
        """Tell the waiters how it ended (for the courier)."""
        self.error, self.seconds = error, time.perf_counter() - self._start
        self._ended.set()
        self.told()
