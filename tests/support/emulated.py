"""The memory of emulated nodes in tests under mpiexec: lose it, bring it back, read what is in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from damage import damage
from mpi4py import MPI

from mlflash.memory.slot_header import HEADER_NBYTES, Header, unpack

COMM = MPI.COMM_WORLD


class Nodes:
    """Node memories of the job "t" and a copy of how they were; what changes them is collective."""

    def __init__(self, root: Path):
        self.path = root / f"mlflash-{os.getuid()}" / "t"
        self._kept = root / "kept"

    def on_rank_0(self, work: Callable[[], object]) -> None:
        """Let one rank work on the memory while no other does."""
        COMM.Barrier()
        if COMM.rank == 0:
            work()
        COMM.Barrier()

    def lose(self, *nodes: int) -> None:
        self.on_rank_0(lambda: self._remove(nodes))

    def damage(self, step: int) -> None:
        """Damage a step beyond repair: own slots and copies."""

        def work() -> None:
            assert damage(self.path, step)

        self.on_rank_0(work)

    def keep(self) -> None:
        self.on_rank_0(lambda: shutil.copytree(self.path, self._kept))

    def bring_back(self, but: Iterable[int] = ()) -> None:
        """Make the memory what it was, but for lost nodes."""

        def work() -> None:
            shutil.rmtree(self.path)
            shutil.copytree(self._kept, self.path)
            self._remove(but)

        self.on_rank_0(work)

    def files(self, node: int) -> list[tuple[Path, Header]]:
        """The files of a node that hold something, by name."""
        found = []
        for path in sorted((self.path / f"node{node}").glob("slot-*")):
            page = path.read_bytes()[:HEADER_NBYTES]
            if page[:8] == b"MLFLASH\0":
                found.append((path, unpack(page)))
        return found

    def _remove(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            shutil.rmtree(self.path / f"node{node}")
