"""What a training has that knows its ranks, besides couriers: registered by who made it, and exchanged each time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from ..errors import ConfigError
from .decider_link import Seat


class Groups(Protocol):
    """Such things, all of one kind."""

    def drop(self) -> None:
        """End what waits for others by them, with an exception. Not collective; any thread."""

    def take(self, rank: int) -> None:
        """Have another rank than the one that was presumed, or begin this program anew. Not collective."""

    def connect(self, seat: Seat, share: Callable[[str, str | None], str]) -> None:
        """Connect them anew. Collective over the ranks of a round.

        Args:
            seat: that this process has from now on.
            share: gives rank 0's text to all ranks, under a name.
        """

    def forget_step(self) -> None:
        """Forget what was begun of a step. Collective."""


registered: list[Groups] = []


def check() -> None:
    """Raise ConfigError where torch.distributed has groups that cannot be exchanged. Not collective."""
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized() and not registered:
        raise ConfigError(
            "mlflash cannot replace these process groups when a rank is lost: set up torch.distributed with "
            "mlflash.adapters.distributed.init_process_group, not with torch's own function", found=torch.get_backend(),
        )  # fmt: skip
