"""RMA windows over slots, and over buffers.

A window exposes memory of each rank of a communicator (or nothing) to Put. It stays under `Lock_all` from
its creation to its end, so that transfers only Put and Flush.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .comm import World


class OpenMemory:
    """Memory of each rank of a communicator, open to Put.

    Collective over ``comm``.

    Args:
        comm: the communicator.
        memory: what this rank exposes, ``(nbytes,)`` uint8; None or empty: nothing.
    """

    def __init__(self, world: World, comm: Any, memory: np.ndarray | None):
        self._mpi = world.mpi
        self._window = self._mpi.Win.Create(memory if memory is not None and memory.nbytes else None, 1, comm=comm)
        self._window.Lock_all(self._mpi.MODE_NOCHECK)

    def put(self, raw: np.ndarray, target: int, at: int) -> Any:
        """Start a Put of bytes to ``at`` of the target's memory; returns the request. Not collective.

        The request ends when ``raw`` may be reused; the bytes are there for sure only after :meth:`flush`.
        """
        return self._window.Rput([raw, self._mpi.BYTE], target, [at, raw.nbytes, self._mpi.BYTE])

    def flush(self, target: int) -> None:
        """Complete all Puts to a target. No deadline: only call it once the target has acknowledged."""
        self._window.Flush(target)

    def flush_all(self) -> None:
        """Complete all Puts. No deadline: as :meth:`flush`."""
        self._window.Flush_all()

    def sync(self) -> None:
        """Make Puts that arrived visible to this rank."""
        self._window.Sync()

    def free(self) -> None:
        """Free the window; the slot stays. Collective over the communicator."""
        self._window.Unlock_all()
        self._window.Free()


class Poke:
    """Push MPI's one-sided progress from this rank.

    MPICH on one host progresses RMA in nothing but a Lock/Unlock (measured: Iprobe, Test and Flush do not).
    """

    def __init__(self, world: World):
        mpi = world.mpi
        self._window = mpi.Win.Allocate(8, 1, comm=mpi.COMM_SELF)

    def __call__(self) -> None:
        self._window.Lock(0)
        self._window.Unlock(0)

    def free(self) -> None:
        self._window.Free()
