"""Which jobs belong together, so that they fail together where couriers are started anew in the middle of them.

All ranks do the same things in the same order, and number them alike: a unit is one of them, such as a restore, with
all its jobs. Couriers that end take the jobs along that they were doing, and each rank may have come to another one. So
no rank goes on in a unit that any rank was in: what it posted next would meet other jobs on the other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator


class Units:
    """The units of one Checkpointer on this rank. Not collective."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._inside: dict[int, int] = {}  # by thread
        self._failed = 0
        self.interrupted = 0
        """The newest that this rank was in when its courier ended; 0: none."""

    @contextlib.contextmanager
    def unit(self, joins: bool = False) -> Iterator[None]:
        """Make one unit of all jobs that this thread posts meanwhile.

        Args:
            joins: inside of another unit, they are that one's.
        """
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
        """Of the unit that this thread is in; 0: it is in none."""
        return self._inside.get(threading.get_ident(), 0)

    def interrupt(self) -> None:
        """Note which units this rank is in, as its courier has ended."""
        self.interrupted = max([self._failed, *list(self._inside.values())])

    def fail(self, newest: int) -> None:
        """Let all units up to one fail: some rank was in it."""
        self._failed = max(self._failed, newest)

    def has_failed(self, number: int) -> bool:
        """Whether nothing of a unit may be done any more."""
        return 0 < number <= self._failed
