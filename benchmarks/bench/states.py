"""States to save, a class that saves them, and the two yardsticks: a memcpy into warm memory, and a raw MPI Put."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from mlflash import Checkpointer

from .aims import MEMCPY, MEMCPY_AND_PUT
from .clock import Action
from .rows import Samples

MIB = 1 << 20
LARGE_NBYTES = 8 * MIB  # per tensor
PUT_NBYTES = 4 * MIB

State = dict[str, torch.Tensor]


def large_state(nbytes: int) -> State:
    if nbytes % LARGE_NBYTES:
        sys.exit("--mib must be a multiple of 8")
    return {f"layer{i}": torch.full((LARGE_NBYTES // 4,), float(i)) for i in range(nbytes // LARGE_NBYTES)}


def bytes_of(state: State) -> Sequence[np.ndarray]:
    return [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in state.values()]


def change(state: State) -> None:
    """Change every tensor of a state, like a training step."""
    torch._foreach_add_(list(state.values()), 1.0)


class Saver:
    """An action that saves a state under the next step, waits until it is committed, and returns the stall."""

    def __init__(self, ckpt: Checkpointer, state: State):
        self._ckpt, self._state = ckpt, state

    def __call__(self, until: torch.optim.Optimizer | None = None) -> dict[str, float]:
        step = (self._ckpt.last_step or 0) + 1
        start = time.perf_counter()
        snapshot = self._ckpt.save(step, self._state, until=until)
        stall_s = time.perf_counter() - start
        snapshot.wait()
        return {"stall": stall_s}


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

    def of(self, pieces: Sequence[np.ndarray]) -> dict[str, Action]:
        """Return both as actions. memcpy copies the pieces one after the other. Put moves as many bytes."""
        nbytes = sum(piece.nbytes for piece in pieces)
        return {MEMCPY: lambda: self.memcpy(pieces), "Put": lambda: self.put(nbytes)}

    def memcpy(self, pieces: Sequence[np.ndarray]) -> None:
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
