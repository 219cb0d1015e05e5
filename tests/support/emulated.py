"""The memory of emulated nodes in tests under mpiexec: lose it, bring it back, read what is in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from damage import damage, headers
from mpi4py import MPI
from on_node import settings_of

from mlflash.memory.slot import Header

COMM = MPI.COMM_WORLD


def on_node(root: Path, per_node: int = 1) -> dict[str, str]:
    """The settings of this rank on emulated nodes of so many ranks."""
    return settings_of(COMM.rank, root, per_node)


class Nodes:
    """Node memories of the job "t" and a copy of how they were; what changes them is collective."""

    def __init__(self, root: Path):
        self.root, self._kept = root, root / "kept"

    def path(self, node: int) -> Path:
        return self.root / f"node{node}" / f"mlflash-{os.getuid()}" / "t"

    @property
    def memories(self) -> list[Path]:
        return sorted(self.root.glob("node*"))

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
            assert sum(damage(memory, step) for memory in self.memories)

        self.on_rank_0(work)

    def keep(self) -> None:
        self.on_rank_0(lambda: [shutil.copytree(memory, self._kept / memory.name) for memory in self.memories])

    def bring_back(self, but: Iterable[int] = ()) -> None:
        """Make the memory what it was, but for lost nodes."""

        def work() -> None:
            for memory in self.memories:
                shutil.rmtree(memory)
            shutil.copytree(self._kept, self.root, dirs_exist_ok=True)
            self._remove(but)

        self.on_rank_0(work)

    def files(self, node: int) -> list[tuple[Path, Header]]:
        return [*headers(self.path(node))]

    def _remove(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            shutil.rmtree(self.root / f"disk{node}" / f"mlflash-{os.getuid()}", ignore_errors=True)
            for path in self.path(node).parent.glob("t*"):  # light saves have a folder of their own
                shutil.rmtree(path)
