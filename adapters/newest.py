"""Choose what a training starts from: the newest of memory and of what its framework wrote to disk."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from mlflash import Checkpointer

log = logging.getLogger("mlflash")

TORN: tuple[type[BaseException], ...] = (EOFError, pickle.UnpicklingError, RuntimeError)
"""What torch raises for a file that was not written completely."""
_UNKNOWN: tuple[type[BaseException], ...] = (OSError, KeyError, ImportError, ValueError)


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A checkpoint that a framework wrote to disk."""

    path: Any  # or what else the log calls it; None: there is none, or it is incomplete and there is no other
    step: int | None = None  # None: unknown
    is_other: bool = False  # whether this is not the checkpoint that was asked for, because that is incomplete

    def is_newer(self, step: int) -> bool:
        """Whether training starts from it instead of a step in memory.

        If both are equally new, or if the step on disk is unknown, training starts from memory, which also has what the
        framework does not save.
        """
        return self.step is not None and self.step > step


def newest_in_memory(checkpointer: Checkpointer, disk: OnDisk, instead: object = None) -> int | None:
    """Find the newest step in memory and the directory. None: there is none, or the checkpoint on disk is newer.

    Collective over all ranks.

    Args:
        disk: the checkpoint on disk, the same on all ranks.
        instead: what else training can start from, if nothing is on disk. None: nothing.

    Raises:
        Unrestorable: there are checkpoints, but none can be loaded, and there is nothing else to start from.
    """
    step = checkpointer.adapting.newest_step(disk.path or instead)
    return None if step is None or disk.is_newer(step) else step


def newest_complete(path: Any, step_of: Callable[[Any], int], others: Callable[[], Iterable[Any]],
                    torn: tuple[type[BaseException], ...] = TORN) -> OnDisk:  # fmt: skip
    """Read the step of a checkpoint. If the checkpoint is incomplete, take the newest other one that can be read.

    It logs a warning for each checkpoint that it cannot read.
    """
    try:
        return OnDisk(path, step_of(path))
    except torn as error:
        log.warning("%s cannot be read, so mlflash looks for another checkpoint: %r", path, error)
    except _UNKNOWN as error:
        log.warning("the step of %s is not known (%r): mlflash assumes that memory is newer", path, error)
        return OnDisk(path)
    newest, unreadable = OnDisk(None), torn + _UNKNOWN
    for other in others():
        try:
            step = step_of(other)
        except unreadable as error:
            log.warning("%s cannot be read: %r", other, error)
            continue
        if newest.step is None or step > newest.step:
            newest = OnDisk(other, step, is_other=True)
    return newest
