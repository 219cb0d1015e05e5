"""The two yardsticks of saves and restores: a memcpy into warm memory, and a raw MPI Put."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from .aims import MEMCPY, MEMCPY_AND_PUT
from .clock import Action
from .rows import Samples

PUT_NBYTES = 4 << 20
Pieces = Sequence[np.ndarray]  # arrays of bytes


class Yardsticks:
    """Memory whose pages exist already, to copy to, and a window over a file in the memory of each rank.

    Collective over comm.

    Args:
        comm: the ranks. Each rank puts into the memory of the next one.
        memory: directory in memory.
        nbytes: size of the largest copy.
    """

    def __init__(self, comm: MPI.Intracomm, memory: Path, nbytes: int):
        self._peer = (comm.rank + 1) % comm.size
        self._target = np.full(nbytes, 1, dtype=np.uint8)
        with tempfile.TemporaryFile(dir=memory) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            exposed = np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)
        exposed[:] = 0
        self._window = MPI.Win.Create(exposed, 1, comm=comm)

    def free(self) -> None:
        """Collective over comm."""
        self._window.Free()

    def of(self, pieces: Pieces) -> dict[str, Action]:
        """Return both as actions. memcpy copies the pieces one after the other. Put moves as many bytes."""
        nbytes = sum(piece.nbytes for piece in pieces)
        return {MEMCPY: lambda: self.memcpy(pieces), "Put": lambda: self.put(nbytes)}

    def memcpy(self, pieces: Pieces) -> None:
        at = 0
        for piece in pieces:
            np.copyto(self._target[at : at + piece.nbytes], piece)
            at += piece.nbytes

    def put(self, nbytes: int) -> None:
        """Put into the file of the next rank, while another rank puts into ours."""
        self._window.Lock(self._peer)
        for at in range(0, nbytes, PUT_NBYTES):
            length = min(PUT_NBYTES, nbytes - at)
            self._window.Put([self._target[at : at + length], MPI.BYTE], self._peer, [at, length, MPI.BYTE])
        self._window.Unlock(self._peer)


def both(samples: Samples) -> Samples:
    """Return the yardsticks from samples that were timed together with `Yardsticks.of`."""
    return {MEMCPY: samples[MEMCPY], MEMCPY_AND_PUT: samples[MEMCPY] + samples["Put"]}
