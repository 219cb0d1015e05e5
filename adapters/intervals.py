"""Decide at which steps a framework's training is saved in memory: at intervals, or whenever the framework saves."""

from __future__ import annotations

import logging

from mlflash import Checkpointer
from mlflash.errors import ConfigError

log = logging.getLogger("mlflash")


def check(every: int | None, skip: int | None) -> None:
    """Refuse intervals that make no sense. None means no interval.

    Raises:
        ConfigError: an interval is less than 1.
    """
    if any(interval is not None and interval < 1 for interval in (every, skip)):
        raise ConfigError("intervals must be 1 or more", found=f"{every}, {skip}")


def is_due(step: int, every: int | None, skip: int | None) -> bool:
    """Whether to save a step that has ended.

    Args:
        step: training step; 0 before the first.
        every: save multiples of this. 0 or less: save none. None: save each step.
        skip: do not save multiples of this. None: skip none.
    """
    every = 1 if every is None else every
    return step > 0 and every > 0 and step % every == 0 and (skip is None or step % skip != 0)


def say(checkpointer: Checkpointer, every: int | None, skip: int | None, own: str, nothing: str = "") -> None:
    """Log on rank 0 which steps will be saved in memory. Not collective.

    Args:
        every, skip: see `is_due`. If ``every`` is None, those that the framework saves.
        own: when the framework saves, as text after "whenever".
        nothing: why the framework saves no step, and which argument changes that. Empty: it saves some.
    """
    if checkpointer.adapting.ranks.rank != 0:
        return
    but = "" if skip is None else f", but not every {skip}"
    if every is not None:
        log.info("saving in memory every %d steps%s", every, but)
    elif nothing:
        log.warning("nothing is saved in memory: %s", nothing)
    else:
        log.info("saving in memory whenever %s%s", own, but)
