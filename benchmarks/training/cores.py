"""Chooses the cores of training and courier, in the same way on a machine with two cores and on one with a hundred."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

ONE_CORE, OWN_CORE = "each rank has one core for both", "the couriers have a core of their own"


class Cores:
    """The cores of a rank.

    Args:
        kind: `ONE_CORE`: training and courier of a rank share one core. `OWN_CORE`: only rank 0 trains, on one core,
            and the couriers of all ranks are on other cores.
        rank: 0 or 1.

    Attributes:
        trains: whether this rank trains.
        courier: the core of its courier.
    """

    def __init__(self, kind: str, rank: int):
        allowed = sorted(os.sched_getaffinity(0))
        self.trains = kind == ONE_CORE or rank == 0
        # With two cores: {0: training, 1: couriers}. With more cores, each courier has its own.
        alone = kind == OWN_CORE and rank == 0
        self._main = allowed[0] if rank == 0 else allowed[-1]
        self.courier = allowed[1] if alone else self._main
        os.sched_setaffinity(0, {self._main})

    @contextlib.contextmanager
    def of_courier(self) -> Iterator[None]:
        """Bind the threads that the block starts to the courier's core."""
        os.sched_setaffinity(0, {self.courier})
        try:
            yield
        finally:
            os.sched_setaffinity(0, {self._main})


def enough() -> bool:
    """Return whether this process has at least two cores."""
    return len(os.sched_getaffinity(0)) > 1
