"""A whole save of mlflash to the other node, until it is committed there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.redundancy import slot_transfer
from mlflash.state import layout

SAVES = {"mlflash, p2p": "p2p", "mlflash, rma": "rma"}


class Saves:
    """Saves a state of one tensor, again and again.

    Collective over comm.

    Args:
        comm: two ranks.
        memory: a directory in memory.
        source: the state, ``(nbytes,)`` uint8.
        chunk_nbytes: bytes per transfer.
        transport: the ``transport=`` of mlflash.
    """

    def __init__(self, comm: MPI.Intracomm, memory: Path, source: np.ndarray, chunk_nbytes: int, transport: str):
        self._comm, self._step, self._snapshot = comm, 0, None
        self._state = {"tensor": torch.from_numpy(source)}
        self._path = memory / f"mlflash-{os.getuid()}" / f"transport-{transport}"
        slot_transfer.CHUNK_BLOCKS = chunk_nbytes // layout.BLOCK_NBYTES
        self._ckpt: Any = Checkpointer(memory=str(memory), job=self._path.name, comm=comm, strict=True, timeout_s=300,
                                       redundancy="copy", transport=transport)  # fmt: skip
        self._ckpt.prepare(self._state)

    def forget(self) -> None:
        """Change the state. Not collective."""
        self._state["tensor"][:: 1 << 16] += 1

    def save(self) -> None:
        self._step += 1
        self._snapshot = self._ckpt.save(self._step, self._state)

    def wait(self) -> None:
        """Wait until the save is committed."""
        assert self._snapshot is not None
        self._snapshot.wait()

    def arrived(self) -> int:
        """Return -1: unknown."""
        return -1

    def free(self) -> None:
        """Collective over comm."""
        self._ckpt.close()
        self._comm.Barrier()
        shutil.rmtree(self._path, ignore_errors=True)
        self._comm.Barrier()
