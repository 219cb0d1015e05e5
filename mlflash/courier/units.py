"""Groups jobs into units that fail together if couriers are started anew in the middle of them.

A unit is one operation, such as a restore, with all its jobs. All ranks do the same operations in the same order and
number them alike. When couriers end, the jobs that they were doing are lost, and each rank may have reached another
job. So no rank continues a unit that any rank was in: its next job would meet other jobs on the other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator


class Units:
    """The units of one Checkpointer on this rank."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._inside: dict[int, int] = {}  # of each thread
        self._failed = 0
        self.interrupted = 0
        """The newest unit that this rank was in when its courier ended; 0: none."""

    @contextlib.contextmanager
    def unit(self, joins: bool = False) -> Iterator[None]:
        """Put all jobs that this thread posts in the ``with`` block into one unit, or (``joins``) into an outer one."""
        me = threading.get_ident()
        before = self._inside.get(me)
        if before is None or not joins:
            self._inside[me] = next(self._numbers)
        try:
            yield
        finally:
            if before is None:
                self._inside.pop(me, None)
            else:
                self._inside[me] = before

    @property
    def number(self) -> int:
        """The number of the unit that this thread is in; 0: none."""
        return self._inside.get(threading.get_ident(), 0)

    def interrupt(self) -> None:
        """Note which units this rank is in, because its courier has ended."""
        self.interrupted = max([self._failed, *list(self._inside.values())])

    def fail(self, newest: int) -> None:
        """Fail all units up to a number, because some rank was in it."""
        self._failed = max(self._failed, newest)

    def has_failed(self, number: int) -> bool:
        """Whether a unit must not continue."""
        return 0 < number <= self._failed
