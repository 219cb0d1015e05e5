"""Files in the memory of other nodes → slots of the ranks that need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..memory.slot import Slot, Use
from ..memory.slot_header import Header
from ..mpi.fabric import OpenMemory
from ..redundancy.slot_transfer import Source, offer, receive, send
from ..startup.context import Context


def fetch(context: Context, serves: Mapping[int, Slot], server: int | None, target: Slot | None,
          is_wanted: Callable[[Header], bool]) -> bool:  # fmt: skip
    """Send files to other ranks and receive one; the receiver checks every byte once more.

    Collective over the world.

    Args:
        serves: for each rank that this one sends a file to, the file.
        server: the rank that sends to this one; None: nothing comes.
        target: a free slot that receives the file and then holds it; it is made large enough.
        is_wanted: whether the header that arrives is the expected one.

    Returns:
        Whether the file arrived whole.
    """
    world = context.world
    to = {rank: slot.header.extents for rank, slot in serves.items() if slot.header is not None}
    # One message for each pair of ranks: a rank fetches one file, and a server tells each of its ranks what will come.
    comes = offer(world, dict(to), [] if server is None else [server])
    extents = None if server is None else comes[server]
    context.ensure_room([] if target is None or extents is None else [(target, extents.nbytes)])
    window = None
    if context.protection.transport == "rma":
        window = OpenMemory(world, world.world, None if target is None else target.view)
    exposed = None if window is None else (0, window)
    work = []
    for rank, sent in to.items():
        aim = None if window is None else _fixed(window, rank)
        work.append(send(world, rank, Source(serves[rank], sent, None), aim))
    if server is not None and target is not None and extents is not None:
        work.append(receive(world, server, target, extents, is_wanted, exposed))
    world.waiting_for = sorted({*to, *([] if server is None else [server])})
    arrived = world.drive(work)
    world.waiting_for = ()
    if window is not None:
        window.free()
    if target is None:
        return True
    target.use = Use.HOLDS if arrived[-1] else Use.FREE
    return bool(arrived[-1])


def _fixed(window: OpenMemory, rank: int) -> Callable[[int], tuple[OpenMemory, int]]:
    return lambda number: (window, rank)
