"""Makes the communicators of the world, the node, the leaders and the group, and has the ranks agree.

Only one thread of the courier makes calls here. `deadlines` defines how it waits.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..errors import MlflashError, MpiUnavailable, WorldMismatch, pip_install, text_of
from ..placement.topology import Node, Topology, from_node_ids
from . import nonblocking
from .deadlines import Pings, Waits
from .nonblocking import Operation

log = logging.getLogger("mlflash")

T = TypeVar("T")

NO_TAG = 3  # no message has this tag
_FORWARDING_S = 1.0  # Hydra drops what it has not forwarded when an Abort arrives: 16 lines of 300, measured


def find_comm(env: Mapping[str, str]) -> Any:
    """Return COMM_WORLD if a launcher started this process. Importing mpi4py initializes MPI, which is collective.

    Raises:
        MpiUnavailable: there is a launcher, but no MPI to load.
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


def load_mpi() -> Any:
    """Import mpi4py.MPI, which initializes MPI. Raises MpiUnavailable if there is none, or no library for it."""
    try:
        from mpi4py import MPI
    except MpiUnavailable:  # its message already says why
        raise
    except (ImportError, RuntimeError) as error:  # a missing library is a RuntimeError
        raise MpiUnavailable(
            "this process was started by an MPI launcher, but mpi4py cannot load an MPI library: install one "
            f"into this environment ({pip_install('mpich')}), or load the module "
            "of your cluster's MPI. You can also set MPI4PY_LIBMPI=/path/to/libmpi.so",
            found=str(error).splitlines()[0],
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def abort_all(mpi: Any, code: int) -> None:
    """End all processes, and let the launcher forward what this one has printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_FORWARDING_S)
    mpi.COMM_WORLD.Abort(code)


class World(Waits):
    """The ranks of one Checkpointer, with communicators of their own after `connect`.

    Args:
        comm: an mpi4py communicator over which nobody else sends anything, or None for one process without MPI.
        node: of this process.
        among: the ranks of ``comm`` that these are, in their order; None: all. The other ranks need not take part.
        name: of this world, the same on all its ranks. Worlds that are made at the same time have different names.
    """

    def __init__(self, comm: Any, node: Node, timeout_s: float, among: Sequence[int] | None = None,
                 name: str = ""):  # fmt: skip
        super().__init__(timeout_s)
        self._given, self._among, self._name = comm, among, name
        self._here, self.ranks_on_host = node, 1  # also those of other containers of this host
        self.group: Any = None  # communicator of the redundancy group, see form_groups
        self.mpi: Any = None
        self.world: Any = None
        self.control: Any = None  # of pings
        self.data: Any = None  # tensor bytes
        self.node: Any = None
        self.leaders: Any = None
        size = 1 if comm is None else comm.size if among is None else len(among)
        if size == 1:
            self.rank, self.size, self.local_rank = 0, 1, 0
            self.topology = Topology((0,), (node.name,))
            return
        self.mpi = load_mpi()
        self.rank, self.size, self.local_rank = comm.rank if among is None else among.index(comm.rank), size, 0
        self.topology = Topology((), ())

    def connect(self) -> World:
        """Make the communicators, and find out which ranks are on which node. Collective. Returns the world itself."""
        if self.mpi is None:
            return self
        self.control = self.duplicate(self._given) if self._among is None else self._of_some(self._among)
        self.pings = Pings(  # from now on missing ranks can be found
            self.mpi, self.control, lambda: self.job_number, lambda: self.doing
        )
        self.world = self.duplicate(self.control)
        self.data = self.duplicate(self.world)
        nodes: list[Node] = self.gather(self._here)
        lowest: dict[tuple[str, str], int] = {}  # the lowest rank of each node
        ids = [(lowest.setdefault((node.host, node.memory), rank), node.name) for rank, node in enumerate(nodes)]
        self.ranks_on_host = sum(node.host == self._here.host for node in nodes)
        self.topology = from_node_ids(ids)
        self.node = self.split(ids[self.rank][0])
        self.local_rank = self.node.rank
        self.leaders = self.split(0 if self.local_rank == 0 else self.mpi.UNDEFINED)
        return self

    def _of_some(self, among: Sequence[int]) -> Any:
        """Make a communicator of some ranks of the given one. Collective over these ranks only."""
        comm = self._given
        tag = zlib.crc32(repr((tuple(among), self._name)).encode()) % comm.Get_attr(self.mpi.TAG_UB)
        # During that call MPI cannot make another communicator here. So no rank enters it for ranks that may never
        # come, see `meet`. These ranks do not have a barrier yet, so they meet by messages.
        others = among[1:] if self.rank == 0 else among[:1]
        arrive, go = (comm.Irecv, comm.Isend) if self.rank == 0 else (comm.Isend, comm.Irecv)
        for do in (arrive, go, arrive, go):
            self.finish(*[do([bytearray(), self.mpi.BYTE], other, tag) for other in others])
        all_ranks = comm.Get_group()
        group = all_ranks.Incl(among)
        with self.within("Comm_create_group"):
            made = comm.Create_group(group, tag)
        group.Free()
        all_ranks.Free()
        return made

    @property
    def local_size(self) -> int:
        return len(self.topology.ranks_on[self.node_index])

    def form_groups(self, colors: Sequence[int]) -> None:
        """Make a communicator for each redundancy group. Collective over the world."""
        self.group = self.split(colors[self.rank])

    def split(self, color: int) -> Any:
        """Make a communicator of the ranks with the same color; None without MPI. Collective over the world."""
        if self.world is None:
            return None
        with self.together("Comm_split", self.world):
            return self.world.Split(color, self.rank)

    def duplicate(self, comm: Any) -> Any:
        """Make another communicator of the same ranks; None without MPI. Collective over ``comm``."""
        if comm is None:
            return None
        made, request = comm.Idup()
        self.finish(request)
        return made

    def drop(self, *comms: Any) -> None:
        """Free communicators, in this order, without those that are None or null. Collective over each."""
        existing = [comm for comm in comms if comm is not None and comm != self.mpi.COMM_NULL]
        for comm in existing:
            self.meet(comm)
        for comm in existing:
            with self.within("Comm_free"):
                comm.Free()

    def free(self) -> None:
        if self.world is not None:
            self.drop(self.group, self.leaders, self.node, self.data, self.control, self.world)
            self.world = self.pings = None

    # Agreement

    def least_of(self, values: Sequence[int], comm: Any = None) -> list[int]:
        if self.world is None:
            return list(values)
        own = np.array(values, dtype=np.int64)
        return [int(value) for value in self._run(nonblocking.least_of(self.mpi, comm or self.world, own))]

    def gather(self, value: Any, comm: Any = None) -> list[Any]:
        """Give every rank the (pickled) value of every rank. Collective over ``comm`` (the world)."""
        if self.world is None:
            return [value]
        values: list[Any] = self._run(nonblocking.gather(self.mpi, comm or self.world, value))
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
        return self._run(nonblocking.broadcast(self.node, value, 0))

    def broadcast(self, value: Any, root: int) -> Any:
        """Give every rank the value of one rank. Collective over the world."""
        return self._run(nonblocking.broadcast(self.world, value, root))

    def raise_together(self, error: MlflashError | None) -> None:
        """If any rank has an error, raise on all that of the lowest rank with one. Collective over the world."""
        self.least_or_raise([], error)

    def least_or_raise(self, values: Sequence[int], error: MlflashError | None) -> list[int]:
        """Take the minimum of each number over all ranks, or raise an error on all if any has one: one allreduce."""
        least: list[int] = self._run(nonblocking.raise_together(self.mpi, self.world, error, values))
        return least

    def end_if_mpi_failed(self, error: BaseException) -> None:
        """End this courier if MPI has failed, for example because another courier has died: the next one goes on.

        The failed MPI operation may have succeeded on other ranks, so a save that failed here may be
        committed there. So this process reports nothing; the next couriers find out what all ranks have.
        """
        if self.mpi is not None and isinstance(error, self.mpi.Exception):
            log.warning("the courier of rank %d ends, because MPI has failed: %s", self.rank, text_of(error))
            os._exit(1)

    def renew_deadline(self) -> None:
        """Start the deadline anew, because all ranks make progress."""
        self.deadline = time.monotonic() + self.timeout_s

    def tell_doing(self, what: str) -> None:
        """Note what this rank does, see `Waits.doing`. Not collective; any thread."""
        self.doing = what

    def on_all(self, work: Callable[[], T]) -> T:
        """Do something on each rank; if any fails, raise its MlflashError on all. Collective over the world."""
        error: MlflashError | None = None
        results: list[T] = []
        try:
            results.append(work())
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # usually an error of the operating system
            error = MlflashError(f"this rank could not go on: {text_of(problem)}")
            error.__cause__ = problem
        if error is not None:
            error.rank, error.node = self.rank, self.node_name
        self.raise_together(error)
        return results[0]

    def _run(self, operation: Operation) -> Any:
        return self.drive([operation])[0]


def gather(world: World, value: Any) -> list[Any]:
    """Give rank 0 the value of the first process of each node; other ranks get []. Collective over the world."""
    if world.local_rank != 0:
        return []
    values = world.gather(value, world.leaders)
    return values if world.rank == 0 else []


def gather_from_all(world: World, value: Any) -> list[Any]:
    """Give rank 0 the value of each process; other ranks get []. Collective over the world."""
    values = world.gather(value)
    return values if world.rank == 0 else []
