"""What the processes of a command see → rank 0, which tells it."""

from __future__ import annotations

from typing import Any

from .world import World


def gather(world: World, value: Any) -> list[Any]:
    """Give rank 0 what the first process of each node brings; all others get nothing. Collective over the world."""
    if world.local_rank != 0:
        return []
    told = world.gather(value, world.leaders)
    return told if world.rank == 0 else []


def gather_from_all(world: World, value: Any) -> list[Any]:
    """Give rank 0 what each process brings; all others get nothing. Collective over the world."""
    told = world.gather(value)
    return told if world.rank == 0 else []
