"""The two sides of an exchange: bytes to send, a file in memory to receive into, checksums at both ends."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from mpi4py import MPI

from mlflash.mpi.rma_windows import Poke
from mlflash.mpi.world import World

BLOCK_NBYTES = 1 << 20
VISIBLE_S = 30.0  # how long a Put chunk may take to become visible after its notice
_CHECKS, _ACK = 1, 2


class Exchange:
    """Both directions between two ranks.

    Collective over comm.

    Args:
        comm: two ranks.
        memory: a directory in memory.
        source: what this rank sends, ``(nbytes,)`` uint8.
        chunk_nbytes: bytes per transfer.
        way: one of `ways.WAYS`. Ways that open epochs themselves get a window that is not locked.
    """

    def __init__(self, comm: MPI.Intracomm, memory: Path, source: np.ndarray, chunk_nbytes: int, way: str):
        self.world = World(comm, 1, timeout_s=600.0).connect()
        self.comm = self.world.data
        self.peer = 1 - comm.rank
        self.source, self.inbox = source, mapped(memory, source.nbytes)
        self.chunks = [slice(at, min(at + chunk_nbytes, source.nbytes)) for at in range(0, source.nbytes, chunk_nbytes)]
        self.group = comm.Get_group().Incl([self.peer])
        self.window = MPI.Win.Create(self.inbox, 1, comm=comm)
        if way == "Rput, pushed":
            self.world.poke = Poke(self.world)
        self._is_locked = way in ("Put + flush", "Rput", "Rput, pushed")
        if self._is_locked:
            self.window.Lock_all(MPI.MODE_NOCHECK)
        elif way == "fence":
            self.window.Fence(MPI.MODE_NOPRECEDE)
        self._sums = [np.zeros(_blocks(chunk), np.uint64) for chunk in self.chunks]
        self._expected = [np.zeros_like(sums) for sums in self._sums]
        self.forget()

    def forget(self) -> None:
        """Prepare the next exchange: no chunk has arrived or is checked. Not collective."""
        self.inbox[:: BLOCK_NBYTES // 16] ^= 1
        self._is_summed = [False] * len(self.chunks)
        self._notices: deque[tuple[int, Any]] = deque()
        self._sent: list[Any] = []

    def free(self) -> None:
        """Collective over comm."""
        if self._is_locked:
            self.window.Unlock_all()
        self.window.Free()
        self.world.free()

    # The steps that all ways have in common

    def begin(self) -> None:
        """Start to receive the checksums of all chunks."""
        for i, expected in enumerate(self._expected):
            self._notices.append((i, self.comm.Irecv(expected, self.peer, _CHECKS)))

    def sum(self, i: int) -> None:
        """Make the checksums of a chunk, if the chunk exists and has none yet."""
        if i < len(self.chunks) and not self._is_summed[i]:
            self._sums[i][:] = _sums(self.source[self.chunks[i]])
            self._is_summed[i] = True

    def notify(self, i: int) -> None:
        """Tell the other rank that a chunk was sent, and send its checksums."""
        self._sent.append(self.comm.Isend(self._sums[i], self.peer, _CHECKS))

    def check_arrived(self, wait: bool = False) -> None:
        """Check the chunks whose notices have arrived. With ``wait``, wait for all chunks."""
        while self._notices and (wait or self._notices[0][1].Test()):
            self.check_one()

    def check_one(self) -> None:
        """Wait for the next notice, and check its chunk."""
        i, notice = self._notices[0]
        self.world.finish(notice)
        self._check(i)
        self._notices.popleft()

    def end(self) -> None:
        """Check the remaining chunks, and wait until the other rank has checked all of ours."""
        self.check_arrived(wait=True)
        arrived = np.zeros(1, np.int64)
        self.world.finish(self.comm.Isend(np.ones(1, np.int64), self.peer, _ACK),
                          self.comm.Irecv(arrived, self.peer, _ACK), *self._sent)  # fmt: skip

    def arrived(self) -> int:
        """Return how many bytes have been checked in an exchange that did not end."""
        waiting = sum(self._sums[i].size for i, _ in self._notices)
        return int(self.source.nbytes - waiting * BLOCK_NBYTES)

    def _check(self, i: int) -> None:
        end = time.monotonic() + VISIBLE_S
        while not np.array_equal(_sums(self.inbox[self.chunks[i]]), self._expected[i]):
            assert time.monotonic() < end, "the bytes that arrived differ from those that were sent"
            self.world.pause()
            if self._is_locked:
                self.window.Sync()


def mapped(memory: Path, nbytes: int) -> np.ndarray:
    """Map a file without a name. All its pages exist."""
    with tempfile.TemporaryFile(dir=memory) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        exposed = np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)
    exposed[:] = 0
    return exposed


def _blocks(chunk: slice) -> int:
    return int(-(-(chunk.stop - chunk.start) // BLOCK_NBYTES))


def _sums(raw: np.ndarray) -> np.ndarray:
    starts = range(0, raw.nbytes, BLOCK_NBYTES)
    return np.array([xxhash.xxh3_64_intdigest(raw[at : at + BLOCK_NBYTES].data) for at in starts], np.uint64)
