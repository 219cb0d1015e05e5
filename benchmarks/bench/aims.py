"""All aims of the design. Each is "at most N times a yardstick"; "N times as fast" is "at most 1/N of the time"."""

from __future__ import annotations

from typing import NamedTuple


class Aim(NamedTuple):
    """A line of the table: what is measured, the yardstick, and the largest allowed multiple of it."""

    what: str
    over: str
    most: float


MILLISECOND, SECOND, MEGABYTE, ONE = PLAIN = "1 ms", "1 s", "1 MB", "one"  # yardsticks of plain numbers
MEMCPY, MEMCPY_AND_PUT = "memcpy", "memcpy + Put"
LOOP, WARM, REDSET = "a loop of copy_", "a warm save", "redset, published"
ALONE = "a step without a save"
OFF = "no saves"
D2H = "cudaMemcpyAsync to pinned memory"
BARE_AND_A_BIT = "import numpy, MPI_Init, and 0.15 s"

AIMS = {
    "stall": Aim("stall of `save`, into warm memory", MEMCPY, 1.1),
    "lazy": Aim("stall of a lazy copy, if a step is longer than the copy", MEMCPY, 0.1),
    "small": Aim("stall of many small tensors", LOOP, 1.1),
    "first": Aim("first save", WARM, 2.0),
    "committed": Aim("committed on two nodes of one host, main thread idle", MEMCPY_AND_PUT, 1.6),
    "committed between hosts": Aim("the same between two hosts", MEMCPY_AND_PUT, 1.4),
    "cpu": Aim("CPU seconds of a save without redundancy", MEMCPY, 2.0),
    "restore": Aim("restore on the same node, every byte checked", MEMCPY, 1.5),
    "views": Aim("restore as views, unchecked", MILLISECOND, 5.0),
    "dcp": Aim("restore through DCP", MEMCPY, 2.0),
    "xor": Aim("XOR encoding", REDSET, 1 / 2),
    "rs": Aim("Reed-Solomon encoding, k=2", REDSET, 1 / 4),
    "slowed": Aim("a step while the courier works on a core of its own", ALONE, 1.03),
    "wall time": Aim("a training with a save every 10 steps and an idle core", OFF, 1.02),
    "each step": Aim("a training that saves each step, with light=9 and an idle core", OFF, 1.03),
    "start": Aim("`Checkpointer(...)`", BARE_AND_A_BIT, 1.0),
    "gpu stall": Aim("stall of `save` of a state on a GPU", D2H, 1.1),
    "gpu lazy": Aim("the same of a lazy copy", D2H, 0.1),
    "planning": Aim("planning at 16,384 ranks", SECOND, 1.0),
    "commit": Aim("allreduces of a commit", ONE, 3.0),
    "inventory": Aim("inventories of all nodes at 16,384 ranks", MEGABYTE, 4.0),
}
