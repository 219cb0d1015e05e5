"""One-sided communication (RMA) within a node and between nodes: whether it works, and how fast it is."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeadlineExceeded, MlflashError
from ..mpi.fabric import has_rdma
from ..mpi.nonblocking import Operation
from ..mpi.rma_windows import Poke
from ..mpi.world import World
from .findings import Finding, fine, warning, wrong

_MOST_NBYTES, _LEAST_NBYTES = 32 << 20, 1 << 20
_SHARE = 16  # each of two ranks of a node takes one part in so many of the free space
_TIMES = 3
_SLOW_RDMA_GBS, _SLOW_GBS = 2.0, 0.1
_DIFFERENT = "the bytes that arrived are not those that were sent"


def with_itself(mpi: Any, memory: str) -> Iterator[Finding]:
    """Put and Get over a window of this process alone. Not collective."""
    exposed, back, source = mapped(memory, _LEAST_NBYTES), np.zeros(_LEAST_NBYTES, np.uint8), pattern(0, _LEAST_NBYTES)
    window = mpi.Win.Create(exposed, 1, comm=mpi.COMM_SELF)
    window.Lock_all(mpi.MODE_NOCHECK)
    for start, raw in ((window.Rput, source), (window.Rget, back)):
        start([raw, mpi.BYTE], 0, [0, raw.nbytes, mpi.BYTE]).Wait()
        window.Flush(0)
    window.Sync()
    same = np.array_equal(exposed, source) and np.array_equal(back, source)
    window.Unlock_all()
    window.Free()
    if same:
        yield fine("RMA", "Put and Get of this process with itself; srun or mpiexec let doctor try it between ranks")
    else:
        yield wrong("RMA", _DIFFERENT, "use another MPI, or another version of it")


def within_nodes(world: World, memory: str) -> Iterator[Finding]:
    """Let the first rank of each node put into the second. Collective over the world; for whole nodes."""
    if max(len(ranks) for ranks in world.topology.ranks_on) == 1:
        return
    trial = Trial(world, memory, world.node if world.local_size > 1 else None)
    if world.local_size > 1 and world.local_rank == 0:
        trial.target = 1
    elif world.local_rank == 1:
        trial.origin = world.topology.ranks_on[world.node_index][0]
    yield from judge("RMA within a node", trial.run(), expects_rdma=False)


def between_nodes(world: World, memory: str) -> Iterator[Finding]:
    """Let the first rank of each node put into that of the next, all at once. Collective; for whole nodes."""
    nodes = len(world.topology.node_names)
    if nodes == 1:
        return
    trial = Trial(world, memory, world.leaders if world.local_rank == 0 else None)
    if world.local_rank == 0:
        trial.target = (world.node_index + 1) % nodes
        trial.origin = world.topology.ranks_on[world.node_index - 1][0]
    yield from judge("RMA between nodes", trial.run(), expects_rdma=has_rdma() and not world.emulated)


class Measured(NamedTuple):
    """The result of a trial on one rank.

    Attributes:
        put, get, copy: 10^9 bytes per second; 0 if this rank put nothing.
        is_same: whether all bytes arrived as they were sent.
    """

    put: float
    get: float
    copy: float
    is_same: bool


class Trial:
    """Put, compare, Get, compare. All ranks go step by step, so that the targets make MPI progress meanwhile.

    Not collective, but :meth:`run` is.

    Args:
        world: all ranks.
        memory: the memory file system that holds the windows.
        comm: the communicator of the window. None: this rank has no window.

    Attributes:
        target: the rank of ``comm`` that this rank puts into. None: it puts nothing.
        origin: the rank of the world that puts into this rank. None: no rank does.
    """

    def __init__(self, world: World, memory: str, comm: Any):
        self._world, self._memory, self._comm = world, memory, comm
        self.target: int | None = None
        self.origin: int | None = None
        self._put_gbs = self._get_gbs = self._copy_gbs = 0.0
        self._is_same = True
        self._window: Any = None
        self._exposed: np.ndarray | None = None

    def run(self) -> Measured:
        """Run the trial. Collective over the world.

        Raises:
            MlflashError: on all ranks, the error of MPI on the lowest rank on which it failed.
        """
        world = self._world
        self._nbytes = world.agree([_room(self._memory)])[0]
        if self._nbytes == 0:
            raise MlflashError(f"one of the nodes has no {self._memory}")
        self._source = pattern(world.rank, self._nbytes if self.target is not None else 0)
        world.poke = Poke(world)
        puts, is_put = self.target is not None, self.origin is not None
        for step, mine in (
            (self._map, is_put), (self._open, self._comm is not None), (self._put, puts),
            (self._compare, is_put), (self._get, puts), (self._close, self._comm is not None),
        ):  # fmt: skip
            error: MlflashError | None = None
            try:
                if mine:
                    step()
            except DeadlineExceeded:
                raise
            except Exception as problem:
                error = MlflashError(str(problem), rank=world.rank, node=world.node_name)
            assert world.world is not None
            if self.origin is not None:  # Puts and Gets of others make progress only when this rank looks
                world.drive([awake(world.world.Ibarrier())])
            else:
                world.finish(world.world.Ibarrier())
            world.raise_together(error)
        world.poke = lambda: None
        return Measured(self._put_gbs, self._get_gbs, self._copy_gbs, self._is_same)

    def _map(self) -> None:
        self._exposed = mapped(self._memory, self._nbytes)

    def _open(self) -> None:
        mpi = self._world.mpi
        self._window = mpi.Win.Create(self._exposed, 1, comm=self._comm)
        self._window.Lock_all(mpi.MODE_NOCHECK)

    def _put(self) -> None:
        copy = np.zeros_like(self._source)
        self._copy_gbs = _speed(self._nbytes, lambda: np.copyto(copy, self._source))
        self._put_gbs = _speed(self._nbytes, lambda: self._move(self._window.Rput, self._source))

    def _compare(self) -> None:
        self._window.Sync()
        assert self.origin is not None and self._exposed is not None
        self._is_same = np.array_equal(self._exposed, pattern(self.origin, self._nbytes))

    def _get(self) -> None:
        back = np.zeros_like(self._source)
        self._get_gbs = _speed(self._nbytes, lambda: self._move(self._window.Rget, back))
        self._is_same = self._is_same and np.array_equal(back, self._source)

    def _move(self, start: Callable[..., Any], raw: np.ndarray) -> None:
        byte = self._world.mpi.BYTE
        self._world.drive([awake(start([raw, byte], self.target, [0, raw.nbytes, byte]))])
        self._window.Flush(self.target)

    def _close(self) -> None:
        self._window.Unlock_all()
        self._window.Free()


def awake(request: Any) -> Operation:
    """Wait for an MPI request without sleeping. `World.drive` sleeps if nothing moves for some time."""
    moved = False
    while not request.Test():
        yield moved
        moved = not moved


def judge(check: str, found: Measured, expects_rdma: bool) -> Iterator[Finding]:
    """Judge the measurement of one rank. A rank that put nothing and found no error gives no result.

    Args:
        check: name of the check.
        found: the measurement.
        expects_rdma: whether MPI could have used an RDMA device.
    """
    if not found.is_same:
        yield wrong(check, _DIFFERENT, "use another MPI or another version of it; MLFLASH_TRANSPORT=p2p uses no RMA")
    elif found.put:
        text = "Put {put_gbs}, Get {get_gbs}, memcpy {copy_gbs}; all bytes compared"
        values = {"put_gbs": found.put, "get_gbs": found.get, "copy_gbs": found.copy}
        if expects_rdma and found.put < _SLOW_RDMA_GBS:
            yield warning(check, text + ": slow for RDMA", "MPI may use TCP instead of RDMA: look at UCX_TLS, "
                          "UCX_NET_DEVICES, FI_PROVIDER, and at memlock", **values)  # fmt: skip
        elif found.put < _SLOW_GBS:
            yield warning(check, text + ": slow", "check which network MPI uses: UCX_NET_DEVICES, FI_TCP_IFACE, "
                          "OMPI_MCA_btl_tcp_if_include", **values)  # fmt: skip
        else:
            yield fine(check, text, **values)


def mapped(memory: str, nbytes: int) -> np.ndarray:
    """Map an unnamed file, which is gone with the array. Not collective."""
    with tempfile.TemporaryFile(dir=memory) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)


def pattern(rank: int, nbytes: int) -> np.ndarray:
    """Make bytes that differ from rank to rank and from neighbor to neighbor."""
    mixed: np.ndarray = (np.arange(nbytes, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)
    mixed ^= np.uint8(rank * 37 % 251)
    return mixed


def _room(memory: str) -> int:
    """Return the number of bytes to try with; 0 without a memory file system."""
    try:
        stat = os.statvfs(memory)
    except OSError:
        return 0
    part = stat.f_bavail * stat.f_frsize // _SHARE // _LEAST_NBYTES * _LEAST_NBYTES
    return min(_MOST_NBYTES, max(_LEAST_NBYTES, part))


def _speed(nbytes: int, work: Callable[[], object]) -> float:
    """Return bytes per nanosecond: the median of several times, after a first one that does not count."""
    seconds = []
    for _ in range(_TIMES + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds[1:]) / 1e9
