"""Runs Checkpointers of a few live ranks in a large job, with unchanged code: start, commits, relaunch and restore."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from scale import tables
from scale.meeting import Call, Fabric
from scale.phantoms import Olds, here, standing_in
from scale.simulated_mpi import module, world

import mlflash
from mlflash.memory.inventory import Inventory, encode
from mlflash.placement.protection_groups import Placement, place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.topology import Topology
from mlflash.state import layout

PER_NODE = tables.PER_NODE
BLOCK_NBYTES, STATE_NBYTES = 64 << 10, 4 << 20
COMMITS = 4  # the last one is counted, since the first ones create slots and agree on the structure
_WAIT_S = 240.0


@dataclasses.dataclass
class Phase:
    """What the live ranks did in one phase, and their CPU time divided by their number.

    Attributes:
        of: the calls of each live rank, the lowest rank first.
        asked: what each rank asked the directory for, and how often.
        cpu_s: CPU seconds of a rank, with the simulation of MPI, without generating what phantoms contribute.
        alone_s: further seconds of the lowest rank, for what it alone did for a drain.
    """

    of: list[list[Call]]
    asked: list[collections.Counter[tuple[str, str]]]
    cpu_s: float
    alone_s: float

    @property
    def calls(self) -> list[Call]:
        """The calls of the lowest live rank."""
        return self.of[0]

    @property
    def busiest(self) -> list[Call]:
        """The calls of the live rank that sent most."""
        return max(self.of, key=lambda some: sum(call.nbytes for call in some))


class SimulatedJob:
    """A job of which only one redundancy group runs.

    Args:
        ranks: size of the world.
        scheme: redundancy.
        transport: "p2p" or "rma".
        alike: whether all ranks hold the same state, and share it.
        memory: one directory in memory that all nodes use.
        cut: whether the state is a tensor sharded over the nodes. All ranks of a node then hold the same rows.
        per_node: ranks on each node.
        directory: where the job drains to. If None, it does not drain.
        before: the job on as many nodes that filled the memory. If None, this job fills it.
    """

    def __init__(
        self, ranks: int, scheme: str, transport: str, alike: bool, memory: Path, cut: bool = False,
        per_node: int = PER_NODE, directory: Path | None = None, before: SimulatedJob | None = None,
    ):  # fmt: skip
        self.ranks, self.scheme, self.transport, self.alike, self.memory = ranks, scheme, transport, alike, memory
        self.cut, self.per_node, self.directory, self.before = cut, per_node, directory, before or self
        self.topology = Topology(
            tuple(rank // per_node for rank in range(ranks)), tuple(f"node{n}" for n in range(ranks // per_node))
        )
        self.placed: Placement = place(self.topology, parse(scheme))
        number = self.placed.connected
        self.live = tuple(rank for rank in range(ranks) if number[rank] == number[0])
        self._lost: int | None = None  # the node that lost all it held
        self._fabric: Fabric | None = None
        self._checkpointers: list[mlflash.Checkpointer] = []
        self._threads = ThreadPoolExecutor(len(self.live))
        self._made: list[bytes] | None = None
        self._is_placed = False  # whether phantoms have told where they are

    @contextlib.contextmanager
    def doubled(self) -> Iterator[SimulatedJob]:
        """Create a job of twice as many ranks on the same nodes, which finds what this job left."""
        job = SimulatedJob(2 * self.ranks, self.scheme, self.transport, self.alike, self.memory, self.cut,
                           2 * self.per_node, self.directory, self)  # fmt: skip
        try:
            yield job
        finally:
            job._end()

    def start(self) -> Phase:
        """Create the Checkpointers of all live ranks."""
        all_ranks = ("all",) if self.alike else ()
        splits = ("node", "leaders", *all_ranks, "group", "group")
        fabric = self._fabric = Fabric(self.ranks, self.per_node, self.live, splits, self._phantoms)
        lost = None if self._lost is None else (self._lost, 0)
        fabric.olds = Olds(self.before.ranks, self.ranks, len(self.topology.node_names), self.live, self.before.live,
                           lost)  # fmt: skip
        self._make_phantoms()
        self._is_placed = False

        def make(rank: int) -> mlflash.Checkpointer:
            return mlflash.Checkpointer(
                comm=world(fabric, rank), job="scale", memory=str(self.memory), redundancy=self.scheme, strict=True,
                transport=self.transport, ranks_per_node=self.per_node, timeout_s=_WAIT_S,
                replicated=True if self.alike else None, share=not self.cut,
                directory=self.directory,
            )  # fmt: skip

        phase, self._checkpointers = self._together(make)
        return phase

    def commit(self, step: int) -> Phase:
        """Save a step and wait for its commit."""
        states = {rank: self._state(rank, step) for rank in self.live}
        return self._together(lambda rank: self._of(rank).save(step, states[rank]).wait())[0]

    def drain(self) -> Phase:
        """Drain the newest checkpoint and wait for it."""
        return self._together(lambda rank: self._of(rank).drain().wait(_WAIT_S))[0]

    def stop(self) -> None:
        """Close the Checkpointers. Their files stay."""
        self._together(lambda rank: self._of(rank).close())

    def _end(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def lose(self, rank: int) -> None:
        """Delete the files of one live rank."""
        for path in self.memory.rglob(f"node{self.topology.node_of[rank]}/slot-*"):
            path.unlink()

    def lose_node(self, rank: int) -> None:
        """Delete all that the node of a live rank holds."""
        self.lose(rank)
        self._lost = self.topology.node_of[rank]

    def forget(self) -> None:
        """Delete all slots in memory."""
        for path in self.memory.rglob("slot-*"):
            path.unlink()

    def restore(self, step: int) -> tuple[Phase, bool]:
        """Restore and heal. Also gives whether every live rank has every byte of the step."""
        found: dict[int, Any] = {rank: self._state(rank, -1) for rank in self.live}

        def restore(rank: int) -> int | None:
            restored = self._of(rank).restore(found[rank])
            self._of(rank).adapting.ranks.agree([0])  # waits for healing, which no public call does
            return restored

        phase, steps = self._together(restore)
        right = all(_bytes_of(found[r]) == _bytes_of(self._state(r, step)) for r in self.live)
        return phase, right and set(steps) == {step}

    def _of(self, rank: int) -> mlflash.Checkpointer:
        return self._checkpointers[self.live.index(rank)]

    def _together(self, work: Callable[[int], Any]) -> tuple[Phase, list[Any]]:
        """Let all live ranks call a function. Gives their MPI calls and their results."""
        fabric = self._fabric
        assert fabric is not None
        first, asked = len(fabric.calls), {rank: fabric.asked[rank].copy() for rank in self.live}
        alone, made_up, start = fabric.alone_s, fabric.made_up_s, time.process_time()

        def as_trainer(rank: int) -> Any:
            here.rank, here.fabric = rank, fabric
            return work(rank)

        running = [self._threads.submit(as_trainer, rank) for rank in self.live]
        through, _ = wait(running, _WAIT_S, FIRST_EXCEPTION)
        for one in through:
            one.result()
        results = [one.result(0) for one in running]
        alone_s = fabric.alone_s - alone
        cpu_s = (time.process_time() - start - (fabric.made_up_s - made_up) - alone_s) / len(self.live)
        calls = fabric.calls[first:]
        of = [[call for call in calls if call.rank == rank] for rank in self.live]
        return Phase(of, [fabric.asked[rank] - asked[rank] for rank in self.live], cpu_s, alone_s), results

    def _make_phantoms(self) -> None:
        """Generate the inventories of all nodes before the timing begins."""
        self._made = None
        if any(self.memory.rglob("slot-*")):
            held = self.before
            parts = tables.whole_inventories(held.topology, held.placed, self.memory, held.live)
            if self._lost is not None:
                parts[self._lost] = Inventory(parts[self._lost].rows[:0])
            self._made = [pickle.dumps(encode(part)) for part in parts]

    def _phantoms(self, comm: str, nbytes: int) -> Sequence[bytes | None] | None:
        """Give what phantoms contribute: first where all ranks are, later the inventories of all nodes."""
        if comm == "world" and not self._is_placed:
            self._is_placed = True
            return [pickle.dumps((rank - rank % self.per_node, f"node{rank // self.per_node}"))
                    for rank in range(self.ranks)]  # fmt: skip
        return self._made if comm == "leaders" and nbytes > len(pickle.dumps(None)) else None

    def _state(self, rank: int, step: int) -> dict[str, Any]:
        """Give the state of a rank at a step. Step -1 gives a state that a restore fills."""
        node = self.topology.node_of[rank]
        seed = [0, 0] if step < 0 else [1 + (node if self.cut else 0 if self.alike else rank), step]
        weights = np.random.default_rng(seed).integers(0, 255, STATE_NBYTES, dtype=np.uint8)
        return {"weights": self._shard(weights, rank) if self.cut else weights, "step": step}

    def _shard(self, rows: np.ndarray, rank: int) -> Any:
        """Give the rows of a rank's node as a DTensor."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        ranks = torch.arange(self.ranks).reshape(-1, self.per_node)
        names = f"nodes of {rank}", f"ranks of {rank}"  # equal names would give two ranks the same mesh in PyTorch
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
        local = torch.from_numpy(rows.view(np.float32))
        whole = torch.Size([len(local) * len(ranks)])
        return DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False, shape=whole, stride=(1,))


def _bytes_of(state: dict[str, Any]) -> bytes:
    weights = state["weights"]
    return bytes(weights if isinstance(weights, np.ndarray) else weights.to_local().numpy().view(np.uint8))


@contextlib.contextmanager
def simulated(*args: Any, **named: Any) -> Iterator[SimulatedJob]:
    """Create a `SimulatedJob` with simulated MPI and a temporary memory. Undo all changes afterwards."""
    top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=top, prefix="mlflash-scale-") as memory, standing_in(module):
        job = SimulatedJob(*args, memory=Path(memory), **named)
        usual, layout.BLOCK_NBYTES = layout.BLOCK_NBYTES, BLOCK_NBYTES
        try:
            yield job
        finally:
            layout.BLOCK_NBYTES = usual
            job._end()
