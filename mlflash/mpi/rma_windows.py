"""RMA windows over slots and buffers.

A window exposes memory of each rank of a communicator to Put; some ranks may expose nothing. It stays under `Lock_all`
from its creation to its end, so that transfers only need Put and Flush.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .world import NO_TAG, World

_CELLS = 64  # the number of cells of MPICH: no more can wait


class OpenMemory:
    """Memory of each rank of a communicator, exposed to Put.

    Collective over ``comm``.

    Args:
        memory: what this rank exposes, ``(nbytes,)`` uint8; None or empty: nothing.
    """

    def __init__(self, world: World, comm: Any, memory: np.ndarray | None):
        self._mpi, self._world, self._comm = world.mpi, world, comm
        with world.together("Win_create", comm):
            self._window = self._mpi.Win.Create(memory if memory is not None and memory.nbytes else None, 1, comm=comm)
            self._window.Lock_all(self._mpi.MODE_NOCHECK)

    def put(self, raw: np.ndarray, target: int, at: int) -> Any:
        """Start a Put of bytes to ``at`` of the target's memory; returns the request.

        The request ends when ``raw`` may be reused. Only after :meth:`flush` the bytes are certain to have arrived.
        """
        return self._window.Rput([raw, self._mpi.BYTE], target, [at, raw.nbytes, self._mpi.BYTE])

    def flush(self, target: int) -> None:
        """Complete all Puts to a target. It blocks, so only call it when the target has acknowledged."""
        with self._world.within("Win_flush"):
            self._window.Flush(target)

    def flush_all(self) -> None:
        with self._world.within("Win_flush_all"):
            self._window.Flush_all()

    def sync(self) -> None:
        """Make Puts that arrived visible to this rank."""
        self._window.Sync()

    def free(self) -> None:
        """Free the window, but not the slot. Collective over the communicator."""
        with self._world.together("Win_free", self._comm):
            self._window.Unlock_all()
            self._window.Free()


class Poke:
    """Push MPI's one-sided progress from this rank, without waiting for anything.

    If MPICH has not allocated the target memory and both ranks are on one host, it moves a Put through cells of 8 KiB.
    One call into MPI moves one cell at each end. With one call per pause this would be a few MB/s. If the main thread
    holds the interpreter, each pause takes 5 ms more, and almost nothing arrives. So each pause makes many calls, which
    probe for a message that nobody sends.
    """

    def __init__(self, world: World):
        self._world = world

    def __call__(self) -> None:
        probe, source = self._world.control.Iprobe, self._world.mpi.ANY_SOURCE
        for _ in range(_CELLS):
            probe(source, NO_TAG)
