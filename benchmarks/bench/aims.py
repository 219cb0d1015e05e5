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
FILES = "FileSystemWriter"

AIMS = {
    "stall": Aim("stall of `save`, into warm memory", MEMCPY, 1.03),
    "lazy": Aim("stall of a lazy copy, if a step is longer than the copy", MEMCPY, 0.1),
    "small": Aim("stall of many small tensors", LOOP, 1.1),
    "first": Aim("first save, unprepared", WARM, 2.0),
    "first prepared": Aim("first save after `prepare`", WARM, 1.2),
    "committed": Aim("committed on two nodes of one host, main thread idle", MEMCPY_AND_PUT, 1.0),
    "committed between hosts": Aim("the same between two hosts", MEMCPY_AND_PUT, 1.4),
    "cpu": Aim("CPU seconds of a save without redundancy", MEMCPY, 1.3),
    "cpu copy": Aim("CPU seconds of a save with a copy on another node", MEMCPY, 2.6),
    "restore": Aim("restore on the same node, every byte checked", MEMCPY, 1.3),
    "small restore": Aim("restore of many small tensors", LOOP, 12.0),
    "views": Aim("restore as views, unchecked", MILLISECOND, 5.0),
    "dcp": Aim("`dcp.load` of large tensors", MEMCPY, 1.8),
    "dcp small stall": Aim("`dcp.async_save` of many small tensors: stall", FILES, 0.6),
    "dcp small total": Aim("the same: committed", FILES, 0.3),
    "dcp small load": Aim("`dcp.load` of many small tensors", FILES, 0.6),
    "xor": Aim("XOR encoding", REDSET, 1 / 2),
    "rs": Aim("Reed-Solomon encoding, k=2", REDSET, 1 / 4),
    "slowed": Aim("a step while the courier works on a core of its own", ALONE, 1.03),
    "wall time": Aim("a training that saves each step, with an idle core", OFF, 1.05),
    "wall time, until": Aim("the same with until=", OFF, 1.02),
    "each step": Aim("a training that saves each step, with light=9 and an idle core", OFF, 1.03),
    "start": Aim("`Checkpointer(...)`", BARE_AND_A_BIT, 1.0),
    "gpu stall": Aim("stall of `save` of a state on a GPU", D2H, 1.1),
    "gpu lazy": Aim("the same of a lazy copy", D2H, 0.1),
    "planning": Aim("planning at 16,384 ranks", SECOND, 1.0),
    "commit": Aim("allreduces of a commit", ONE, 3.0),
    "inventory": Aim("inventories of all nodes at 16,384 ranks", MEGABYTE, 4.0),
}
