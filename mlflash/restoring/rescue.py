"""Without training: write what is in memory to the directory, or make it whole again.

Processes that exist only for this run it on the remaining nodes. Their number does not matter, because each can hand in
the state of several ranks of the job. Lost slots are first rebuilt from copies or parity, and stay in memory.
"""

from __future__ import annotations

from ..draining.drain import Drain
from ..draining.drain_input import DrainInput
from ..draining.drain_queue import DrainQueue
from ..memory.wanted_step import NEWEST
from ..redundancy.rank_checkpoint import RankCheckpoint
from ..startup.context import Context
from . import from_memory
from .heal import heal as make_whole

BY = "scavenge"


def scavenge(context: Context, drains: DrainQueue) -> Drain | None:
    """Begin to drain the newest checkpoint that memory has; None if the directory has it. Collective over the world."""
    listed = drains.listed()
    restorable = (one for one in listed if NEWEST.fits(one.step, one.verdict))
    newest = max((one.card.attempt.generation for one in restorable), default=0)
    found = from_memory.find_and_verify(context, NEWEST, others=True, oldest=newest + 1)
    if found is None:
        return None
    if isinstance(found, RankCheckpoint):
        header, mine = found.header, {context.world.rank: found}
        drain_input = DrainInput(header.attempt, header.step, header.world_size, lambda: mine, header.mark, by=BY,
                                 verdict=lambda: context.restored_verdict)  # fmt: skip
    else:
        headers = [home.header for home in found.homes.values()]
        told = [max((header.world_size for header in headers), default=0), max((h.mark for h in headers), default=0)]
        world_size, mark = (-number for number in context.world.agree([-number for number in told]))
        homes = found.homes
        drain_input = DrainInput(found.attempt, found.step, world_size, lambda: homes, mark, by=BY,
                                 verdict=lambda: context.restored_verdict)  # fmt: skip
    return drains.begin(drain_input)


def heal(context: Context) -> int | None:
    """Heal the newest checkpoint in memory, on as many ranks as the job has; return its step."""
    found = from_memory.find_and_verify(context, NEWEST)
    if not isinstance(found, RankCheckpoint):
        return None
    make_whole(context, found.slot)
    return found.header.step
