"""A table of all aims of the design. Each aim is "at most N times a yardstick".

An aim "at least N times as fast" is written as "at most 1/N of the time".
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Aim:
    """A line of the table.

    Attributes:
        what: what is measured, in the words of the design.
        peer: the best value of other libraries when the aim was set.
        over: the yardstick. For a plain number it is "1 ms", "1 s", "1 MB" or "one".
        most: the largest allowed multiple of the yardstick.
        question: the folder that measures it.
    """

    what: str
    peer: str
    over: str
    most: float
    question: str


MEMCPY, MEMCPY_AND_PUT = "memcpy", "memcpy + Put"
LOOP, WARM, REDSET = "a loop of copy_", "a warm save", "redset, published"
ALONE = "a step without a save"
OFF = "no saves"
D2H = "cudaMemcpyAsync to pinned memory"
BARE_AND_A_BIT = "the same + 0.15 s"

AIMS = {
    "stall": Aim("stall of `save`, into warm memory", "1.0 (DLRover; DCP with a reused stager)", MEMCPY, 1.1, "save"),
    "lazy": Aim("stall of a lazy copy, if a step is longer than the copy", "", MEMCPY, 0.1, "save"),
    "small": Aim("many small tensors (3000 x 4 KiB): stall", "DCP 15 to 40", LOOP, 1.1, "sizes"),
    "first": Aim("first save", "1.6 to 6", WARM, 2.0, "sizes"),
    "committed": Aim(
        "committed on two nodes of one host, checksums at both ends, main thread idle",
        "ml-flashpoint about 5 memcpys, no checksum", MEMCPY_AND_PUT, 1.6, "save",
    ),
    "committed between hosts": Aim("the same, but between two hosts", "", MEMCPY_AND_PUT, 1.4, "transport"),
    "cpu": Aim(
        "CPU seconds of a save without redundancy, with checksums", "DCP 7 to 12, no checksum of content",
        MEMCPY, 2.0, "save",
    ),
    "restore": Aim(
        "restore on the same node into live tensors, every byte checked", "DCP 3 to 15", MEMCPY, 1.5, "restore"
    ),
    "views": Aim("restore on the same node as views, unchecked", "DLRover 2 to 12 ms, 512 MiB", "1 ms", 5.0, "restore"),
    "dcp": Aim("restore through DCP", "3 to 15", MEMCPY, 2.0, "dcp"),
    "xor": Aim("XOR encoding (4 ranks): twice as fast", "redset 1.20 GB/s", REDSET, 1 / 2, "parity"),
    "rs": Aim("Reed-Solomon encoding, k=2 (4 ranks): four times as fast", "redset 0.46 GB/s", REDSET, 1 / 4, "parity"),
    "slowed": Aim("a step of training while the courier works, on a core of its own", "", ALONE, 1.03, "training"),
    "wall time": Aim("a training with a save every 10 steps and an idle core", "", OFF, 1.02, "walltime"),
    "start": Aim(
        "`Checkpointer(...)` with a courier process, compared with `import numpy` and MPI_Init", "",
        BARE_AND_A_BIT, 1.0, "startup",
    ),
    "gpu stall": Aim("stall of `save` of a state on a GPU", "", D2H, 1.1, "gpu"),
    "gpu lazy": Aim("the same of a lazy copy, if a step is longer than the copy", "", D2H, 0.1, "gpu"),
    "planning": Aim("planning at 16,384 ranks (simulated)", "not published", "1 s", 1.0, "scale"),
    "commit": Aim("allreduces of a commit at 16,384 ranks", "not published", "one", 3.0, "scale"),
    "inventory": Aim("inventory at 16,384 ranks, per node", "not published", "1 MB", 4.0, "scale"),
}  # fmt: skip
