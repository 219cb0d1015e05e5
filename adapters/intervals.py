"""At which steps a framework's training is saved in memory, where its user gives two intervals."""

from __future__ import annotations

from mlflash.errors import ConfigError


def check(every: int | None, skip: int | None) -> None:
    """Refuse intervals that make no sense; None is none.

    Raises:
        ConfigError: one is less than 1.
    """
    if any(interval is not None and interval < 1 for interval in (every, skip)):
        raise ConfigError("intervals are 1 or more", found=f"{every}, {skip}")


def is_due(step: int, every: int, skip: int | None) -> bool:
    """Whether a step that has ended is to be saved.

    Args:
        step: 0 before the first.
        every: where it is a multiple of this; 0 or less: never.
        skip: but not of this; None: none such.
    """
    return step > 0 and every > 0 and step % every == 0 and (skip is None or step % skip != 0)
