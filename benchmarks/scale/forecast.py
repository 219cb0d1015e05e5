"""The model at 1,000 to 100,000 GPUs: schemes in memory compared with checkpoints in file systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from scale import model
from scale.parameters import NODE_MTBF_RSC_S, NODE_MTBF_S, PERLMUTTER, SLINGSHOT_11, TECTONIC, Fabric, FileSystem, Node

from mlflash.placement.redundancy_scheme import parse

GPUS = (1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 100_000)
FEW = (1000, 16_000, 100_000)  # shown in tables


@dataclasses.dataclass(frozen=True)
class Line:
    """One way to keep checkpoints.

    Attributes:
        label: its name in tables and plots.
        scheme: redundancy in memory. Empty if checkpoints are only in the file system.
        pfs: the file system that holds the checkpoints, or that they are drained to.
        waits: whether training waits for the file system.
    """

    label: str
    scheme: str
    pfs: FileSystem
    waits: bool = False

    @property
    def in_memory(self) -> bool:
        """Whether checkpoints are in memory."""
        return bool(self.scheme)


LINES = (
    Line("memory, copy", "copy", PERLMUTTER),
    Line("memory, xor:8", "xor:8", PERLMUTTER),
    Line("memory, rs:6+2", "rs:6+2", PERLMUTTER),
    Line(f"PFS, {PERLMUTTER.name}, asynchronous", "", PERLMUTTER),
    Line(f"PFS, {PERLMUTTER.name}, training waits", "", PERLMUTTER, waits=True),
    Line(f"PFS, {TECTONIC.name}, asynchronous", "", TECTONIC),
)


@dataclasses.dataclass(frozen=True)
class Point:
    """Result of the model for one line and number of GPUs.

    Attributes:
        stall_s: how long training waits for a save.
        committed_s: from the call of ``save`` until the checkpoint is safe.
        restored_s: from the start of new ranks to a state on the GPUs, after a node was lost.
        waste, waste_rsc: share of lost time at the failure rate of Llama 3, and at that of Meta's research clusters.
    """

    gpus: int
    line: Line
    stall_s: float
    committed_s: float
    restored_s: float
    waste: float
    waste_rsc: float


def points(node: Node, fabric: Fabric = SLINGSHOT_11, gpus: tuple[int, ...] = GPUS) -> Iterator[Point]:
    """Compute the model for each line and number of GPUs."""
    for line in LINES:
        for number in gpus:
            machine = model.Machine(number, node, fabric)
            if line.in_memory:
                scheme = parse(line.scheme)
                stall, committed = machine.stall_s, model.committed_s(machine, scheme)
                restored = model.restored_s(machine, scheme)
                lost = [model.memory_waste(machine, line.scheme, line.pfs, mtbf) for mtbf in _MTBF]
            else:
                committed, restored = model.pfs_committed_s(machine, line.pfs), model.pfs_restored_s(machine, line.pfs)
                stall = committed if line.waits else machine.stall_s
                lost = [model.pfs_waste(machine, line.pfs, line.waits, mtbf) for mtbf in _MTBF]
            yield Point(number, line, stall, committed, restored, *lost)


_MTBF = (NODE_MTBF_S, NODE_MTBF_RSC_S)
