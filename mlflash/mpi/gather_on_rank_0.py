"""Gathers on rank 0 what the processes of a command see. Rank 0 prints it."""

from __future__ import annotations

from typing import Any

from .world import World


def gather(world: World, value: Any) -> list[Any]:
    """Give rank 0 the value of the first process of each node; other ranks get []. Collective over the world."""
    if world.local_rank != 0:
        return []
    told = world.gather(value, world.leaders)
    return told if world.rank == 0 else []


def gather_from_all(world: World, value: Any) -> list[Any]:
    """Give rank 0 the value of each process; other ranks get []. Collective over the world."""
    told = world.gather(value)
    return told if world.rank == 0 else []
