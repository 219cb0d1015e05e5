"""Without training: what is in memory → the directory, or made whole again.

By processes that are there for this only, on the nodes that are left; of whatever number, as each can hand in the
state of several ranks of the job. What is lost is rebuilt from copies or parity first, and stays in memory.
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
    """Begin to drain the newest checkpoint that memory can give.

    Collective over the world; for a job of the courier.

    Returns:
        The drain; None where the directory has what memory has, or more.
    """
    listed = drains.listed()
    newest = max((one.card.attempt.generation for one in listed), default=0)
    found = from_memory.find_and_verify(context, NEWEST, others=True, oldest=newest + 1)
    if found is None:
        return None
    if isinstance(found, RankCheckpoint):
        header, mine = found.header, {context.world.rank: found}
        drain_input = DrainInput(header.attempt, header.step, header.world_size, lambda: mine, header.mark,
                                 context.restored_verdict, by=BY)  # fmt: skip
    else:
        headers = [home.header for home in found.homes.values()]
        told = [max((header.world_size for header in headers), default=0), max((h.mark for h in headers), default=0)]
        world_size, mark = (-number for number in context.world.agree([-number for number in told]))
        homes = found.homes
        drain_input = DrainInput(found.attempt, found.step, world_size, lambda: homes, mark,
                                 context.restored_verdict, by=BY)  # fmt: skip
    return drains.begin(drain_input)


def heal(context: Context) -> int | None:
    """Make the redundancy of the newest checkpoint in memory whole again.

    Collective over the world, which must be of as many ranks as the job; for a job of the courier.

    Returns:
        Its step; None where memory has nothing.

    Raises:
        WorldSizeChanged: this is another number of ranks.
        MemoryTooSmall, SaveFailed: it could not be made whole; what there was is untouched.
    """
    found = from_memory.find_and_verify(context, NEWEST)
    if not isinstance(found, RankCheckpoint):
        return None
    make_whole(context, found.slot)
    return found.header.step
