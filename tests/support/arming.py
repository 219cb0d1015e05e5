"""Have couriers that are processes do what a test wants at the named points of mlflash, as its own process does."""

from __future__ import annotations

import os
from pathlib import Path

_ARMED = str(Path(__file__).parent / "armed")


def arm_couriers(module: str) -> None:
    """Let ``arm`` of a module of this folder be called in each courier that this process is going to have.

    Not collective. It goes by the environment: where a courier is a thread, nothing comes of it.
    """
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [_ARMED, *(path for path in before if path and path != _ARMED)]
    os.environ.update(MLFLASH_TEST_ARMS=module, PYTHONPATH=os.pathsep.join(paths))
