"""What a training has, besides couriers, that knows its ranks: it is registered, and replaced in each round."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from ..errors import ConfigError
from .decider_link import Seat


class Groups(Protocol):
    """Such things, all of one kind."""

    def drop(self) -> None:
        """Raise an exception in whatever waits for other ranks through them. Not collective; any thread."""

    def take(self, rank: int) -> None:
        """Take another rank than the presumed one, or begin this program anew."""

    def connect(self, seat: Seat, share: Callable[[str, str | None], str]) -> None:
        """Connect them anew. Collective over the ranks of a round.

        Args:
            seat: the seat that this process has from now on.
            share: gives rank 0's text, under a name, to all ranks.
        """

    def forget_step(self) -> None:
        """Forget what was begun of a step. Collective."""


registered: list[Groups] = []


def check() -> None:
    """Raise ConfigError if torch.distributed has groups that cannot be replaced."""
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized() and not registered:
        raise ConfigError(
            "mlflash cannot replace these process groups when a rank is lost: set up torch.distributed with "
            "mlflash.adapters.distributed.init_process_group, not with torch's own function", found=torch.get_backend(),
        )  # fmt: skip
