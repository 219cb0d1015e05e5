"""Checkpointers of a few live ranks in a job of many: start, commits, relaunch and restore, with the code as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scale import tables
from scale.meeting import Call, Fabric
from scale.simulated_mpi import module, world

import mlflash
import mlflash.mpi.world
from mlflash.memory.inventory import encode
from mlflash.placement.protection_groups import Placement, place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.topology import Topology

PER_NODE = tables.PER_NODE
BLOCK_NBYTES, CHUNK_NBYTES, STATE_NBYTES = 64 << 10, 256 << 10, 4 << 20
COMMITS = 4  # of which the last is counted: the first ones make slots and agree on the structure
_WAIT_S = 240.0


@dataclasses.dataclass
class Phase:
    """What the lowest live rank did in one phase, and processor time of all live ranks, divided by their number.

    Attributes:
        calls: of the lowest live rank.
        busiest: of the live rank that sent most.
        cpu_s: seconds of processor time of a rank, the simulation of MPI in it.
    """

    calls: list[Call]
    busiest: list[Call]
    cpu_s: float


class SimulatedJob:
    """A job of so many ranks, of which one redundancy group lives.

    Args:
        ranks: of the world.
        scheme: redundancy.
        transport: "p2p" or "rma".
        alike: whether all ranks hold the same state, and share it.
        memory: directory in memory that stands for that of all nodes.
    """

    def __init__(self, ranks: int, scheme: str, transport: str, alike: bool, memory: Path):
        self.ranks, self.scheme, self.transport, self.alike, self.memory = ranks, scheme, transport, alike, memory
        self.topology = Topology(
            tuple(rank // PER_NODE for rank in range(ranks)), tuple(f"node{n}" for n in range(ranks // PER_NODE))
        )
        self.placed: Placement = place(self.topology, parse(scheme))
        number = self.placed.connected
        self.live = tuple(rank for rank in range(ranks) if number[rank] == number[0])
        self.lost: set[int] = set()
        self._fabric: Fabric | None = None
        self._checkpointers: list[mlflash.Checkpointer] = []
        self._threads = ThreadPoolExecutor(len(self.live))
        self._made: list[bytes] | None = None
        self._is_placed = False  # where all ranks are was told

    def start(self) -> Phase:
        """Make the Checkpointers."""
        all_ranks = ("all",) if self.alike else ()
        splits = ("node", "leaders", *all_ranks, "group", "group")
        fabric = self._fabric = Fabric(self.ranks, PER_NODE, self.live, splits, self._phantoms)

        self._make_phantoms()
        self._is_placed = False

        def make(rank: int) -> mlflash.Checkpointer:
            return mlflash.Checkpointer(
                comm=world(fabric, rank), job="scale", memory=str(self.memory), redundancy=self.scheme, strict=True,
                transport=self.transport, ranks_per_node=PER_NODE, timeout_s=_WAIT_S, block_nbytes=BLOCK_NBYTES,
                chunk_nbytes=CHUNK_NBYTES, replicated=True if self.alike else None,
            )  # fmt: skip

        phase, self._checkpointers = self._together(make)
        return phase

    def commit(self, step: int) -> Phase:
        """Save a step and wait for its commit."""
        states = {rank: _state(0 if self.alike else rank, step) for rank in self.live}

        def save(rank: int) -> None:
            checkpointer = self._checkpointers[self.live.index(rank)]
            checkpointer.save(step, states[rank]).wait()

        return self._together(save)[0]

    def stop(self) -> None:
        """Close the Checkpointers; their files stay."""
        self._together(lambda rank: self._checkpointers[self.live.index(rank)].close())

    def end(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def lose(self, rank: int) -> None:
        """Delete the files of one live rank, and with it those of its whole node."""
        for path in self.memory.rglob(f"node{rank // PER_NODE}/slot-*"):
            path.unlink()
        self.lost = {rank}

    def restore(self, step: int) -> tuple[Phase, bool]:
        """Restore, and heal; also gives whether every live rank has every byte of the step."""
        found: dict[int, Any] = {rank: _state(-1, 0) for rank in self.live}

        def restore(rank: int) -> int | None:
            checkpointer = self._checkpointers[self.live.index(rank)]
            restored = checkpointer.restore(found[rank])
            checkpointer.adapting.ranks.agree([0])  # healing goes on behind; nothing public waits for it
            return restored

        phase, steps = self._together(restore)
        right = all(np.array_equal(found[r]["weights"], _state(r, step)["weights"]) for r in self.live)
        return phase, right and set(steps) == {step}

    def _together(self, work: Callable[[int], Any]) -> tuple[Phase, list[Any]]:
        """Let all live ranks do something; gives what they called, and their results."""
        fabric = self._fabric
        assert fabric is not None
        first, start = len(fabric.calls), time.process_time()
        running = [self._threads.submit(work, rank) for rank in self.live]
        results = [one.result(_WAIT_S) for one in running]
        cpu_s = (time.process_time() - start) / len(self.live)
        calls = fabric.calls[first:]
        by_rank = [[call for call in calls if call.rank == rank] for rank in self.live]
        return Phase(by_rank[0], max(by_rank, key=lambda some: sum(c.nbytes for c in some)), cpu_s), results

    def _make_phantoms(self) -> None:
        """Make the inventories of all nodes, before anything is timed."""
        self._made = None
        if any(self.memory.rglob("slot-*")):
            parts = tables.whole_inventories(self.topology, self.placed, self.memory, self.live)
            self._made = [pickle.dumps(encode(part)) for part in parts]

    def _phantoms(self, comm: str, nbytes: int) -> Sequence[bytes] | None:
        """Where all ranks are, at first; then inventories of all nodes, in place of those of the few with files."""
        if comm == "world" and not self._is_placed:
            self._is_placed = True
            return [pickle.dumps((rank - rank % PER_NODE, f"node{rank // PER_NODE}")) for rank in range(self.ranks)]
        return self._made if comm == "leaders" and nbytes > len(pickle.dumps(None)) else None


def _state(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank + 1, step])
    return {"weights": random.integers(0, 255, STATE_NBYTES, dtype=np.uint8), "step": step}


@contextlib.contextmanager
def simulated(ranks: int, scheme: str, transport: str = "p2p", alike: bool = False) -> Iterator[SimulatedJob]:
    """Make a job whose MPI is simulated; memory and module are as they were afterwards."""
    real = mlflash.mpi.world.load_mpi
    top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=top, prefix="mlflash-scale-") as memory:
        mlflash.mpi.world.load_mpi = module
        job = SimulatedJob(ranks, scheme, transport, alike, Path(memory))
        try:
            yield job
        finally:
            mlflash.mpi.world.load_mpi = real
            job.end()
