"""A state is copied to plain memory of this process if its slots are too small, so that training need not wait.

The pages of a slot are made for all ranks of a node, are filled with zeros, and are mapped by two processes. Plain
memory needs none of that. It is freed when the slot has the state.
"""

from __future__ import annotations

import numpy as np

from ..memory.copy_threads import CopyThreads
from ..memory.memory_limits import available, headroom
from ..state.layout import plan
from ..state.leaves import Flat, from_bytes
from .copy_plan import CopyPlan

_BLOCK_NBYTES = 1 << 20  # of the layout, which has no checksums here


def copy_to_host(flat: Flat, slots: float, memory: str, local_size: int, copy_threads: CopyThreads) -> Flat | None:
    """Copy a state.

    Args:
        slots: bytes that all slots of a rank, and their redundancy, take for each byte of it.
        local_size: ranks on this node, which may all do the same now.

    Returns:
        The same leaves with values of their own. None if some are on a device, which copies at full speed only to
        page-locked memory, or if the node would not have the memory in addition to that of all slots.
    """
    if flat.is_on_device:
        return None
    layout = plan(flat, 0, _BLOCK_NBYTES)
    nbytes = layout.extents.payload_nbytes
    wanted = int(local_size * nbytes * (1 + slots))
    if wanted + headroom(wanted) > min(available(memory).values()):
        return None
    room = np.empty(nbytes, dtype=np.uint8)
    values = [from_bytes(entry, room[entry.start : entry.start + entry.nbytes]) for entry in layout.entries]
    ties = flat.structure.ties
    way = CopyPlan(layout, [], [value if tie < 0 else None for value, tie in zip(values, ties, strict=True)],
                   copy_threads, timeout_s=0.0)  # no leaf is on a device  # fmt: skip
    way.lead(flat, frozenset())
    way.copy(flat.values)
    return Flat(flat.structure, values, flat.plain, flat.wholes)
