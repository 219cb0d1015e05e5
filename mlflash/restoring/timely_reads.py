"""Reads files so that each read ends by a deadline, even if the file system does not answer.

A read that hangs cannot be interrupted. So each read runs on a thread of its own, and its caller stops waiting for it.
The thread only has the bytes that it reads: what they are copied to may be used again at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import DeadlineExceeded
from ..events import Event
from ..protocol.ranks import Collectives

T = TypeVar("T")

_TELL_S = 1.0  # a read that takes longer is told to the ranks that wait
_SHARE = 0.9  # of `timeout_s` for a read: then this rank says what it could not read before others wait no more


class Reads:
    """Reads without a deadline, for threads that nobody waits for."""

    hang = False
    """Whether a read has not ended in time, and may still use what it reads from."""

    def run(self, name: str, read: Callable[[], T], done: int = 0, nbytes: int = 0) -> T:
        """Read something from a file, and return it.

        Args:
            name: of the file.
            read: does it.
            done, nbytes: how much of the file was read before, and how much is needed; 0: unknown.
        """
        return read()


class TimelyReads(Reads):
    """Reads that end within ``timeout_s`` of the ranks; other ranks hear what this one reads if it takes long.

    Args:
        world: the ranks that may wait for this one.
        path: the directory of the files.
    """

    def __init__(self, world: Collectives, path: str):
        self._world, self._path, self._limit_s = world, path, _SHARE * world.timeout_s

    def run(self, name: str, read: Callable[[], T], done: int = 0, nbytes: int = 0) -> T:
        """Read something from a file, and return it.

        Raises:
            DeadlineExceeded: it takes too long.
            Exception: whatever the read raised.
        """
        if self.hang:
            raise self._late(name, "")
        result: list[T] = []
        error: list[BaseException] = []
        has_ended = Event()

        def work() -> None:
            try:
                result.append(read())
            except BaseException as problem:  # raised below
                error.append(problem)
            has_ended.set()

        threading.Thread(target=work, name="mlflash-read", daemon=True).start()
        end = time.monotonic() + self._limit_s
        how_far = f", {done / 1e6:.1f} of {nbytes / 1e6:.1f} MB" if nbytes else ""
        is_told = False
        while not has_ended.wait(min(_TELL_S, end - time.monotonic())):
            if time.monotonic() >= end:
                self.hang = True
                raise self._late(name, how_far)
            if not is_told:
                self._world.tell_doing(f"reading {self._path}/{name}{how_far}")
                is_told = True
        if is_told:
            self._world.tell_doing("restoring")
        if error:
            raise error[0]
        return result[0]

    def _late(self, name: str, how_far: str) -> DeadlineExceeded:
        world = self._world
        where: dict[str, Any] = {"rank": world.rank, "node": world.node_name, "ranks": [world.rank]}
        return DeadlineExceeded(
            f"a read of {self._path}/{name}{how_far} did not end within {self._limit_s:g} s. Nothing was restored: "
            "look at the file system on that node, and start the job again", **where, nodes=[world.node_name],
        )  # fmt: skip
