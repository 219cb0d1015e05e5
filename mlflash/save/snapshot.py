"""What `save` returns: a snapshot, which becomes a checkpoint when all ranks have committed it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from ..errors import DeadlineExceeded, MlflashError, SaveFailed
from ..events import Event
from .deferred_copies import DeferredCopies

log = logging.getLogger("mlflash")

_POLL_S = 0.5  # between two checks whether the courier is held up


class Snapshot:
    """A staged state that is about to be committed.

    Attributes:
        step: the training step.
        nbytes: bytes that it takes in this rank's slot.
        stall_s: how long ``save`` kept training waiting, seconds.
        commit_s: seconds from the call of ``save`` to the commit; None before the commit. A small state may be
            committed a moment before ``save`` returns.
        skipped: whether all ranks skipped this save because all slots of one rank were busy, or because mlflash is
            off.
    """

    def __init__(self, step: int, blocked: Callable[[], DeadlineExceeded | None]):
        self.step = step
        self._blocked = blocked  # tells why an earlier operation of the courier does not end, if one does not
        self.nbytes = 0
        self.stall_s = 0.0
        self.commit_s: float | None = None
        self.skipped = False
        self.reported = False  # whether its error was raised to the caller
        self.later: DeferredCopies | None = None  # copies that are made after `save` has returned
        self._start = time.monotonic()
        self._error: MlflashError | None = None
        self._late: DeadlineExceeded | None = None
        self._committed = False
        self._ended = Event()
        self._woken = Event()  # set when it has ended or is late
        self._waking = threading.Lock()
        self._callbacks: list[Callable[[Snapshot], None]] = []

    @property
    def committed(self) -> bool:
        """Whether all ranks agreed that this step is a checkpoint: from then on it survives the loss of a node."""
        return self._committed

    @property
    def age_s(self) -> float:
        """Seconds since ``save`` was called."""
        return time.monotonic() - self._start

    @property
    def done(self) -> bool:
        """Whether it was committed or has failed, or was never begun because mlflash is off."""
        return self._ended.is_set()

    @property
    def error(self) -> MlflashError | None:
        """Why it failed or is late; None if nothing is wrong."""
        return self._error or (None if self._committed else self._late)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait until the snapshot is committed.

        Not collective.

        Args:
            timeout: seconds. None: wait as long as the Checkpointer's ``timeout_s`` lets the save run.

        Returns:
            The snapshot itself.

        Raises:
            SaveFailed: it will not be committed; the last committed step is untouched.
            DeadlineExceeded: the time is up and it is not committed yet; it may still be.
        """
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._woken.wait(max(0.0, min(_POLL_S, end - time.monotonic()))):
            if (blocked := self._blocked()) is not None:
                raise blocked
            if time.monotonic() >= end:
                raise DeadlineExceeded(
                    f"not committed within {timeout:g} s (it may still be committed)", step=self.step
                )
        if self.error is not None:
            raise self.error
        return self

    def wait_staged(self) -> None:
        """Copy what is left to be copied; afterwards anything may change the state.

        Not collective. Only a save with ``until=`` leaves anything to be copied. If something fails, `wait` raises it.
        """
        if self.later is not None:
            self.later.finish()
            self.later.hold_back()

    def add_done_callback(self, call: Callable[[Snapshot], None]) -> None:
        """Call a function with this snapshot when :meth:`wait` would return or raise: the save has ended, or is late.

        Not collective. The function is called once, on the courier's thread, where it must not wait for anything. If
        the save has already ended or is late, this call runs the function itself.
        """
        with self._waking:
            if not self._woken.is_set():
                self._callbacks.append(call)
                return
        call(self)

    def end(self, error: MlflashError | None, at: float | None = None) -> None:
        """Tell the waiters, once, how the save ended (for the courier).

        Args:
            at: when it ended, in seconds of `time.monotonic`: the courier's message may have to wait here for the
                interpreter. None: now.
        """
        if self._ended.is_set():
            return
        if error is None:
            self.commit_s = (time.monotonic() if at is None else at) - self._start
            self._committed = True
        else:
            self._error = error if isinstance(error, SaveFailed) else _failed(error, self.step)
        self._ended.set()
        self._wake()

    def leave(self) -> None:
        """Tell the waiters that the save never began because mlflash is off; this is not a failure."""
        self.skipped = True
        self._ended.set()
        self._wake()

    def late(self, error: DeadlineExceeded) -> None:
        """Tell the waiters that the save takes too long; it may still end well (for the courier)."""
        error.step = self.step
        self._late = error
        self._wake()

    def _wake(self) -> None:
        with self._waking:
            self._woken.set()
            calls, self._callbacks = self._callbacks, []
        for call in calls:
            try:
                call(self)
            except BaseException:  # it is the user's code: saves must continue, and no other rank would hear of it
                log.exception("a callback of the snapshot of step %d failed", self.step)


def has_committed(snapshot: Snapshot) -> bool:
    """Wait for the end of a save. Return whether it is committed, which is the same on all ranks. Not collective."""
    with contextlib.suppress(MlflashError):
        snapshot.wait_staged()
        snapshot.wait()
    return snapshot.committed


def _failed(error: MlflashError, step: int) -> SaveFailed:
    failed = SaveFailed(f"this step was not saved: {error}", rank=error.rank, node=error.node, step=step,
                        ranks=error.ranks, nodes=error.nodes)  # fmt: skip
    failed.__cause__ = error
    return failed
