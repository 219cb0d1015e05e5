"""Simulates how thousands of couriers find each other: the requests of MPI to our PMI-1 servers, over one store.

Store, clients and PMI servers are those of mlflash, and talk over loopback. The store has its own process, like the
zygote of rank 0. The requests are those of MPICH 5.0.2. On each node one rank puts its address, in segments of a
kilobyte: one with libfabric, 9 with UCX. All ranks enter a barrier. Then that rank gets the addresses of all nodes. In
a real start all ranks wait for the store's process. The other work is spread over all nodes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

from mlflash.wireup.key_value_store import KeyValueStore, listen
from mlflash.wireup.pmi_server import PmiServer, new_epoch_name
from mlflash.wireup.store_client import StoreClient
from mlflash.wireup.strangers import MOST

WORKERS = 2
PATIENCE_S = 600.0
SEGMENT = "F" * 1000


def lines_of(epoch: str, node: int, is_first: bool, nodes: int, segments: int) -> Iterator[str]:
    """Yield the requests of one rank's MPI, one line each."""
    yield from ("init pmi_version=1 pmi_subversion=1", "get_maxes", "get_appnum", "get_my_kvsname")
    yield f"get kvsname={epoch} key=PMI_process_mapping"
    if is_first:
        yield f"put kvsname={epoch} key=-allgather-{node} value=segments={segments}"
        for number in range(segments):
            yield f"put kvsname={epoch} key=-allgather-{node}-seg-{number} value={SEGMENT}"
    yield "barrier_in"
    if is_first:
        for other in range(nodes):
            yield f"get kvsname={epoch} key=-allgather-{other}"
            for number in range(segments):
                yield f"get kvsname={epoch} key=-allgather-{other}-seg-{number}"
    yield "barrier_in"


class Rank:
    """One rank: the store client and PMI server of its zygote, and the MPI that talks to them."""

    def __init__(
        self, epoch: str, rank: int, node_of: list[int], lines: Iterator[str], address: tuple[str, int], token: str
    ):
        server, mpi = socket.socketpair()
        self.store = StoreClient(address, token)
        self.server = PmiServer(server, epoch, rank, node_of, self.store)
        self.mpi, self._lines, self._is_up = mpi, lines, False
        self._received = b""
        self.watched: dict[int, int] = {}
        self.mpi.setblocking(False)
        self.ask()

    @property
    def is_over(self) -> bool:
        return self._is_up and not self.store._then

    def watches(self) -> Iterator[tuple[int, int, Callable[[], None]]]:
        yield self.mpi.fileno(), select.POLLIN, self.hear
        yield self.server.fileno(), select.POLLIN, self.server.receive
        yield self.store.fileno(), self.store.events, self.store.step

    def ask(self) -> None:
        line = next(self._lines, None)
        if line is None:
            self._is_up = True
            self.server.initialized()
        else:
            self.mpi.sendall(f"cmd={line}\n".encode())

    def hear(self) -> None:
        self._received += self.mpi.recv(1 << 16)
        if self._received.endswith(b"\n"):
            assert b"rc=-1" not in self._received and b"rc=1" not in self._received, self._received
            self._received = b""
            self.ask()


class Start(NamedTuple):
    """What a start took.

    Attributes:
        seconds: time until all ranks were up.
        store_s, store_mib: CPU time and memory of the store.
        keys, keys_left: the most keys of the store, and the keys that stay.
        node_s: CPU time of the ranks of one node.
    """

    seconds: float
    store_s: float
    store_mib: float
    keys: int
    keys_left: int
    node_s: float


def wire_up(nodes: int, per_node: int, segments: int = 1) -> Start:
    """Start all ranks at once."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    node_of = [rank // per_node for rank in range(nodes * per_node)]
    epoch = new_epoch_name(1)
    pipe, store_pipe = multiprocessing.Pipe()
    is_over, worker_seconds = multiprocessing.Event(), multiprocessing.SimpleQueue()  # type: ignore[var-annotated]
    store = multiprocessing.Process(target=serve, args=(len(node_of), store_pipe, is_over))
    store.start()
    address, token = pipe.recv()
    start = time.perf_counter()

    def work(worker: int) -> None:
        cpu_start = time.process_time()
        run_ranks([
            Rank(epoch, rank, node_of, lines_of(epoch, node, rank % per_node == 0, nodes, segments), address, token)
            for rank, node in enumerate(node_of) if node % WORKERS == worker
        ])  # fmt: skip
        worker_seconds.put(time.process_time() - cpu_start)

    workers = [multiprocessing.Process(target=work, args=(worker,)) for worker in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    seconds = time.perf_counter() - start
    is_over.set()
    store_s, store_mib, keys, keys_left = pipe.recv()
    store.join(PATIENCE_S)
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("the ranks did not come up")
    ranks_s = sum(worker_seconds.get() for _ in workers)
    return Start(seconds, store_s, store_mib, keys, keys_left, ranks_s / nodes)


def run_ranks(ranks: list[Rank]) -> None:
    """Run some ranks until they are up."""
    poll = select.epoll()
    acts: dict[int, tuple[Rank, Callable[[], None]]] = {}
    for rank in ranks:
        watch(poll, acts, rank)
    left = len(ranks)
    while left:
        for fd, _ in poll.poll():
            if fd not in acts:  # it was closed meanwhile
                continue
            rank, act = acts[fd]
            was_over = rank.is_over
            act()
            if rank.server.error or rank.store.lost:
                raise RuntimeError(str(rank.server.error or rank.store.lost))
            watch(poll, acts, rank)
            left -= rank.is_over and not was_over


def watch(poll: select.epoll, acts: dict[int, tuple[Rank, Callable[[], None]]], rank: Rank) -> None:
    """Poll the descriptors that a rank waits for now."""
    wanted = {fd: (events, act) for fd, events, act in rank.watches() if fd >= 0}
    for fd in rank.watched.keys() - wanted.keys():
        del acts[fd]
        with contextlib.suppress(OSError):  # it was closed
            poll.unregister(fd)
    for fd, (events, act) in wanted.items():
        if fd not in rank.watched:
            poll.register(fd, events)
        elif rank.watched[fd] != events:
            poll.modify(fd, events)
        acts[fd] = (rank, act)
    rank.watched = {fd: events for fd, (events, _) in wanted.items()}


def serve(size: int, pipe: Any, is_over: Event) -> None:
    """Run the store until the event is set."""
    store = KeyValueStore(listen(), strangers=MOST + 2 * size)
    pipe.send((store.address, store.token))
    keys = 0
    while not is_over.is_set():
        store.step(0.05)
        keys = max(keys, len(store))
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pipe.send((time.process_time(), mib, keys, len(store)))
