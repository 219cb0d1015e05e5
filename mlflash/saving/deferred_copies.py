"""What is copied after `save` has returned: tensors that nothing changes before an optimizer's next step.

The courier copies while training computes; when training comes to the step, it copies what is left (the idea is
DataStates-LLM's, Maurya et al., HPDC 2024). A tensor that was nevertheless written to in between has another version,
or other bytes than were noted (`mutation_check`). Then the save fails: no torn copy is committed.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..crash_points import reach
from ..errors import DeadlineExceeded, StateError, text_of
from ..events import Event
from .device_copies import DeviceCopies
from .mutation_check import SampledBytes

Work = Callable[[], None]

_CHANGED = (
    "it was changed before it was copied, and not by a step of an optimizer that mlflash hears of (it does not "
    "hear of steps in a CUDA graph or in another program): call wait_staged() before you change it, or save "
    "without until= (MLFLASH_LAZY=0)"
)


class DeferredCopies:
    """The copies of one save that need not be made when it returns.

    Args:
        pieces: each copies a part of a CPU tensor; in any order, on any thread.
        tensors: names and tensors that must not change before everything is copied.
        timeout_s: how long anything here waits at most; after that the save fails.

    Attributes:
        is_over: whether the save has ended, so that nothing needs to wait any more.
        tell_changed: called if something other than an optimizer's step changed a tensor; on any thread.
    """

    def __init__(
        self,
        pieces: Sequence[Work],
        transfers: Sequence[DeviceCopies],
        tensors: Iterable[tuple[str, Any]],
        timeout_s: float,
        samples: SampledBytes | None = None,
    ):
        self._spots = samples or SampledBytes()
        self._pieces = collections.deque(pieces)
        self._left = len(self._pieces)
        self._transfers = list(transfers)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._versions = [(name, tensor, tensor._version) for name, tensor in tensors]
        self._made = Event()  # set when all pieces are copied
        self.error: StateError | None = None
        self.tell_changed: Callable[[], object] = lambda: None
        self.is_empty = self.is_over = not self._pieces and not self._transfers
        if not self._pieces:
            self._made.set()

    @property
    def is_done(self) -> bool:
        """Whether nothing is written any more."""
        return self._made.is_set() and all(transfer.is_done for transfer in self._transfers)

    def help(self) -> None:
        """Copy pieces until none is left to begin; other threads may still be copying theirs."""
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            try:
                piece()
                reach("lazy.piece")
            except BaseException as error:
                self._fail(StateError(f"the state could not be copied: {text_of(error)}"))
                if not isinstance(error, Exception):  # from a signal handler, on the training thread
                    raise
            finally:
                self._count(1)

    def hold_back(self) -> None:
        """Make everything that the caller does from now on, or gives a device to do, come after the copies."""
        self.help()
        self._await_pieces()
        for transfer in self._transfers:
            transfer.hold_back()
        with self._lock:
            self._check()
            self._versions.clear()  # from now on tensors may change

    def finish(self) -> None:
        """Make all copies that are left, and wait until all are made."""
        self.help()
        self._await_pieces()
        for transfer in self._transfers:
            if not transfer.wait(self._timeout_s):
                self._fail(StateError(f"a device did not finish its copies within {self._timeout_s:g} s"))
        self.look()
        if self.error is None and (name := self._spots.changed()) is not None:
            self._fail_changed(name, " (by a write that torch does not count, such as to .data)")

    def look(self) -> None:
        """Check whether something other than an optimizer's step changed a tensor.

        Call it once more when the slot is sealed: an operation counts its change only when it ends.
        """
        with self._lock:  # a thread that waits for the lock may step as soon as it has it
            self._check()

    def cancel(self) -> None:
        """Drop the copies not begun, and wait for the others. Raises DeadlineExceeded if one is still being made."""
        dropped = 0
        while self._pieces:
            try:
                self._pieces.popleft()
                dropped += 1
            except IndexError:
                break
        self._count(dropped)
        made = self._made.wait(self._timeout_s)
        if not made or not all(transfer.wait(self._timeout_s) for transfer in self._transfers):
            raise DeadlineExceeded(f"a copy did not finish within {self._timeout_s:g} s")
        with self._lock:
            self._versions.clear()
        self.is_over = True

    def _count(self, number: int) -> None:
        with self._lock:
            self._left -= number
            if self._left == 0:
                self._made.set()

    def _await_pieces(self) -> None:
        if not self._made.wait(self._timeout_s):
            self._fail(StateError(f"a copy did not finish within {self._timeout_s:g} s"))

    def _check(self) -> None:
        changed = [name for name, tensor, version in self._versions if tensor._version != version]
        if changed:
            self._fail_changed(changed[0])

    def _fail_changed(self, name: str, how: str = "") -> None:
        self.tell_changed()
        self._fail(StateError(_CHANGED + how, tensor=name))

    def _fail(self, error: StateError) -> None:
        self.error = self.error or error
