"""Saves that all ranks begin before it is known whether they follow: a framework plans first, and may fail.

A rank on which a save does not follow posts its failure: the jobs of all ranks must match.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator

from ..errors import SaveFailed
from .early_staging import StagedState

log = logging.getLogger("mlflash")


@dataclasses.dataclass(eq=False)
class ReservedSave:
    """A save that was begun on all ranks, and that this rank posts, or fails.

    Attributes:
        thread: works for it, and has finished with it when it posts it, begins something else, or ends.
        staged_states: what had been staged ahead when it was begun; nothing else will use it.
        came: whether its thread has come back to save it, and will post it.
    """

    step: int
    thread: threading.Thread
    staged_states: tuple[StagedState, ...]
    came: bool = False


class ReservedSaves:
    """The reserved saves of this rank."""

    def __init__(self, post_failure: Callable[[ReservedSave], None], timeout_s: float):
        self._post_failure, self._timeout_s = post_failure, timeout_s
        self._all: list[ReservedSave] = []
        self._lock = threading.Lock()

    def add(self, step: int, thread: threading.Thread, staged_states: tuple[StagedState, ...]) -> ReservedSave:
        """Announce that a save follows; see `Adapting.begin`."""
        begun = ReservedSave(step, thread, staged_states)
        with self._lock:
            self._all.append(begun)
        return begun

    def end(self, at_once: bool = False) -> None:
        """Post the failure of saves that their thread has left; ``at_once``: also of those whose thread still works."""
        here = threading.current_thread()
        with self._lock:
            waiting = [begun for begun in self._all if not begun.came]
            over = [one for one in waiting if at_once or one.thread is here or not one.thread.is_alive()]
            self._all = [begun for begun in self._all if begun not in over]
        for begun in over:
            if at_once:
                log.warning(
                    "step %d is not saved: the thread that began this save did not come back to it in time", begun.step
                )
            self._post_failure(begun)

    def wait(self) -> None:
        """Wait until all saves, or their failures, are posted; those that do not come in time fail.

        What this thread posts next comes after them in any case.
        """
        end = time.monotonic() + self._timeout_s
        self.end()
        while self._all:
            time.sleep(1e-3)
            self.end(at_once=time.monotonic() > end)

    @contextlib.contextmanager
    def coming(self, begun: ReservedSave) -> Iterator[None]:
        """Let other threads' posts wait until the block has posted this save. Raises SaveFailed if it was given up."""
        with self._lock:
            if begun not in self._all:
                raise SaveFailed("this save was given up before its thread came back to it", step=begun.step)
            begun.came = True
        try:
            yield
        finally:
            with self._lock:
                self._all.remove(begun)
