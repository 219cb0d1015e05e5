"""State words that the ranks of a node share: one `Allocate_shared` window per node.

It holds words, never tensors: memory of `Allocate_shared` is freed with the job, the slots must not be.
"""

from __future__ import annotations

import enum
import time
from typing import Any

import numpy as np

from .world import World


class Word(enum.IntEnum):
    """The words of one rank, int64 each."""

    COMMITTED_GENERATION = 0
    COMMITTED_STEP = 1
    DEMAND_NBYTES = 2  # bytes this rank is about to allocate
    HEARTBEAT_NS = 3  # unix time of the last change
    OWN_SLOT_0 = 4  # slot directory: file numbers of the own slots
    OWN_SLOT_1 = 5
    OWN_SLOT_2 = 6


class Board:
    """The words of all ranks of this node.

    Collective over the node.
    """

    def __init__(self, world: World):
        self._world = world
        self._window: Any = None
        shape = (world.local_size, len(Word))
        if world.node is None:
            self.words: np.ndarray = np.zeros(shape, dtype=np.int64)
            return
        nbytes = 8 * shape[0] * shape[1] if world.local_rank == 0 else 0
        with world.together("Win_allocate_shared", world.node):
            self._window = world.mpi.Win.Allocate_shared(nbytes, 8, comm=world.node)
        memory, _ = self._window.Shared_query(0)
        self.words = np.frombuffer(memory, dtype=np.int64).reshape(shape)
        self._window.Lock_all(world.mpi.MODE_NOCHECK)
        self.words[world.local_rank] = 0
        self._window.Sync()

    def put(self, word: Word, value: int) -> None:
        """Write one of this rank's words. Not collective."""
        row = self.words[self._world.local_rank]
        row[word] = value
        row[Word.HEARTBEAT_NS] = time.time_ns()
        if self._window is not None:
            self._window.Sync()

    def column(self, word: Word) -> list[int]:
        """Read one word of every rank of the node, by local rank. Not collective."""
        if self._window is not None:
            self._window.Sync()
        return [int(value) for value in self.words[:, word]]

    def free(self) -> None:
        """Free the window. Collective over the node."""
        if self._window is not None:
            self.words = np.zeros_like(self.words)
            with self._world.together("Win_free", self._world.node):
                self._window.Unlock_all()
                self._window.Free()
            self._window = None
