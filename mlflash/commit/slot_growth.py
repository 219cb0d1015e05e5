"""Makes slots larger: larger files, or an error before anything is allocated if a node lacks memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..crash_points import reach
from ..errors import MemoryTooSmall
from ..memory import shared_memory_segment
from ..memory.memory_limits import available, headroom, other_files
from ..memory.node_directory import NodeDirectory
from ..memory.slot import Slot, Use
from ..memory.slot_pool import unmap
from ..mpi.world import World
from ..state.layout import PAGE_NBYTES, round_up

_FILES_NAMED = 3  # kinds of files of others that an error names


def needs_room(slot: Slot, nbytes: int) -> bool:
    """Whether a slot needs a larger file for ``nbytes``, or another one because somebody has removed its own."""
    is_too_small = slot.view.nbytes < nbytes or slot.is_gone
    return slot.use is not Use.HOLDS and not slot.drains and is_too_small and not slot.is_lent


def grow_slots(world: World, memory: NodeDirectory, demand: Sequence[tuple[Slot, int]]) -> None:
    """Give slots larger files, or fail before anything is allocated if the node has no room for them.

    Collective over the world. A slot that holds a committed step is left as it is. Raises MemoryTooSmall on all ranks,
    with the numbers of the node that lacks memory.
    """
    todo = [(slot, round_up(nbytes, PAGE_NBYTES)) for slot, nbytes in demand if needs_room(slot, nbytes)]
    asked = sum(nbytes - slot.view.nbytes for slot, nbytes in todo)
    asked = asked if world.node is None else sum(world.gather(asked, world.node))

    def look() -> None:
        left = available(memory.path)
        what, least = min(left.items(), key=lambda item: item[1])
        spared = headroom(asked)
        if todo and asked + spared > least:
            raise MemoryTooSmall(
                "the slots of this node do not fit into its memory: save less, use fewer ranks per node or a scheme "
                "that needs less memory, or raise the limit named below (/dev/shm: mount -o remount,size=...; in a "
                "container --shm-size; in a pod sizeLimit of its emptyDir)",
                expected=f"{asked:,} bytes more for the slots of {world.local_size} ranks, and {spared:,} bytes to "
                "spare",
                found=f"{least:,} bytes: {what}" + _others(memory),
            )

    def create() -> None:
        try:
            for slot, nbytes in todo:
                reach("room.begun")
                old, slot.segment = slot.segment, None  # mapped until `grow` has checked that the file is still its own
                unmap(slot)  # a free slot holds nothing that is still needed
                if old is None:
                    slot.segment = shared_memory_segment.create(memory, nbytes)
                else:
                    slot.segment = shared_memory_segment.grow(memory, old, nbytes)
                reach("room.created")
        finally:  # even if another rank found no room: the new files stay and will be used
            shared_memory_segment.prefault_in_background([slot.segment for slot, _ in todo if slot.segment is not None])

    world.on_all(look)
    world.on_all(create)


def _others(memory: NodeDirectory) -> str:
    jobs = "".join(f"\n    {job}: {nbytes:,} bytes" for job, nbytes in memory.other_jobs().items())
    files = "".join(f"\n    {kind}" for kind in other_files(memory.memory)[:_FILES_NAMED])
    return (f"; other jobs of yours hold slots here (`mlflash clean JOB` frees those of a dead one):{jobs}" * bool(jobs)
            + f"; this is not mlflash's (what a killed job has left may be deleted):{files}" * bool(files))  # fmt: skip
