"""Checkpoints that a framework wrote to disk: find the step of one, or another one if it is incomplete."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("mlflash")

TORN: tuple[type[BaseException], ...] = (EOFError, pickle.UnpicklingError, RuntimeError)
"""What torch raises for a file that was not written completely."""
_UNKNOWN: tuple[type[BaseException], ...] = (OSError, KeyError, ImportError, ValueError)


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A checkpoint on disk.

    Attributes:
        path: its path. None: the checkpoint is incomplete, and there is no other.
        step: its step. None: unknown.
        is_other: whether this is not the checkpoint that was asked for, because that is incomplete.
    """

    path: Any
    step: int | None = None
    is_other: bool = False


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
