"""RMA windows over slots, and over buffers.

A window exposes memory of each rank of a communicator (or nothing) to Put. It stays under `Lock_all` from
its creation to its end, so that transfers only Put and Flush.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .world import NO_TAG, World

_CELLS = 64  # as many as MPICH has of them: more cannot wait


class OpenMemory:
    """Memory of each rank of a communicator, open to Put.

    Collective over ``comm``.

    Args:
        comm: the communicator.
        memory: what this rank exposes, ``(nbytes,)`` uint8; None or empty: nothing.
    """

    def __init__(self, world: World, comm: Any, memory: np.ndarray | None):
        self._mpi, self._world, self._comm = world.mpi, world, comm
        with world.together("Win_create", comm):
            self._window = self._mpi.Win.Create(memory if memory is not None and memory.nbytes else None, 1, comm=comm)
            self._window.Lock_all(self._mpi.MODE_NOCHECK)

    def put(self, raw: np.ndarray, target: int, at: int) -> Any:
        """Start a Put of bytes to ``at`` of the target's memory; returns the request. Not collective.

        The request ends when ``raw`` may be reused; the bytes are there for sure only after :meth:`flush`.
        """
        return self._window.Rput([raw, self._mpi.BYTE], target, [at, raw.nbytes, self._mpi.BYTE])

    def flush(self, target: int) -> None:
        """Complete all Puts to a target: only call it once the target has acknowledged, as it blocks."""
        with self._world.within("Win_flush"):
            self._window.Flush(target)

    def flush_all(self) -> None:
        """Complete all Puts: as :meth:`flush`."""
        with self._world.within("Win_flush_all"):
            self._window.Flush_all()

    def sync(self) -> None:
        """Make Puts that arrived visible to this rank."""
        self._window.Sync()

    def free(self) -> None:
        """Free the window; the slot stays. Collective over the communicator."""
        with self._world.together("Win_free", self._comm):
            self._window.Unlock_all()
            self._window.Free()


class Poke:
    """Push MPI's one-sided progress from this rank, without waiting for anything.

    Not collective.

    On one host MPICH moves a Put into memory that it did not allocate through cells of 8 KiB, and one call into MPI
    moves one cell at each end. One call a nap would be some MB/s; under a main thread that holds the interpreter, each
    nap takes 5 ms more, and nothing seems to arrive. So a pause makes many calls: these look for a message that nobody
    sends.
    """

    def __init__(self, world: World):
        self._world = world

    def __call__(self) -> None:
        probe, source = self._world.control.Iprobe, self._world.mpi.ANY_SOURCE
        for _ in range(_CELLS):
            probe(source, NO_TAG)
