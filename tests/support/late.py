"""Copies that saves have left for later, made as late as they may: when training waits for them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from waiting import is_in, until

from mlflash import crash_points
from mlflash.save.deferred_copies import DeferredCopies
from mlflash.save.snapshot import Snapshot

_WAITS = (DeferredCopies.hold_back, Snapshot.wait, concurrent.futures.Future.result)


def copy_late(came: Callable[[], object]) -> None:
    """Copy nothing of these until training waits; ``came`` is called for each piece for which a step waits."""
    training = threading.main_thread()

    def reached(point: str) -> None:
        if point != "lazy.piece":
            return
        if threading.current_thread() is not training:
            until(lambda: any(is_in(training, wait) for wait in _WAITS), "training waits for copies, or for the commit")
        if is_in(training, DeferredCopies.hold_back):
            came()

    crash_points.arm(reached)
