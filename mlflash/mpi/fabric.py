"""The network between the nodes of a job: its kind, the transport that "auto" chooses for it, and windows for Put."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .world import NO_TAG, World

RDMA_DEVICES = ("/sys/class/infiniband", "/sys/class/cxi")
"""Folders in which Linux lists the RDMA devices of a node: InfiniBand and RoCE, Slingshot."""

# The transport that "auto" chooses, by the network; from the tables of benchmarks/transport. Isend and Irecv were by
# far the fastest on one host. On a network they were within an eighth of the best Put, or faster while the main thread
# computed. RDMA was not measured. There, a Put does not use the CPU of its target, and messages need both couriers.
# UCX's cma is the only software fabric with this property; over it both were equally fast.
AUTO = {"one host": "p2p", "network": "p2p", "RDMA": "rma"}


def has_rdma() -> bool:
    """Whether this node has an RDMA device (InfiniBand, RoCE, Slingshot)."""
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in RDMA_DEVICES)


def between_nodes(world: World) -> str:
    """The kind of network between the nodes: a key of `AUTO`. Collective over the world."""
    if world.ranks_on_host == world.size:
        return "one host"
    return "RDMA" if world.all_of(has_rdma()) else "network"


def choose_transport(world: World, asked: str) -> str:
    """The transport asked for, or for "auto" the one for this network. Collective over the world."""
    return asked if asked != "auto" else AUTO[between_nodes(world)]


# Windows: memory of each rank, exposed to Put


_CELLS = 64  # the number of cells of MPICH: no more can wait


class OpenMemory:
    """Memory of each rank of a communicator, exposed to Put. Collective over ``comm``.

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
