"""Simulates how thousands of couriers find each other: the requests of MPI to our PMI-1 servers, over one store.

    python benchmarks/scale/wireup.py [--nodes 512] [--ranks-per-node 8] [--segments 9]

Store, clients and PMI servers are those of mlflash, and talk over loopback. The store has its own process, like the
zygote of rank 0. The program replays the requests that MPICH 5.0.2 with UCX sends. On each node one rank puts its
address, in segments of a kilobyte. All ranks enter a barrier. Then that rank gets the addresses of all nodes. In a real
start all ranks wait for the store's process. The other work is spread over all nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event

from mlflash.wireup.address_relay import Watch
from mlflash.wireup.key_value_store import KeyValueStore
from mlflash.wireup.pmi_server import PmiServer, new_epoch_name
from mlflash.wireup.store_client import StoreClient
from mlflash.wireup.store_limits import Limits

WORKERS = 2
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
        mine, its = socket.socketpair()
        self.store = StoreClient(address, token)
        self.server = PmiServer(mine, epoch, rank, node_of, self.store)
        self.mpi, self._lines, self._is_up = its, lines, False
        self._received = b""
        self.watched: dict[int, int] = {}
        self.mpi.setblocking(False)
        self.ask()

    @property
    def is_over(self) -> bool:
        """Whether MPI is up and the store has answered all requests."""
        return self._is_up and not self.store._then

    def watches(self) -> Iterator[Watch]:
        yield self.mpi.fileno(), select.POLLIN, self.hear
        yield from self.server.watches()
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


def work(
    mine: list[int], epoch: str, args: argparse.Namespace, address: tuple[str, int], token: str, told: object
) -> None:
    """Run all ranks of some nodes."""
    allow_descriptors()
    size = args.nodes * args.ranks_per_node
    node_of = [rank // args.ranks_per_node for rank in range(size)]
    poll, left = select.epoll(), 0
    watched: dict[int, tuple[Rank, Callable[[], None]]] = {}
    start = time.process_time()
    for rank in mine:
        lines = lines_of(epoch, node_of[rank], rank % args.ranks_per_node == 0, args.nodes, args.segments)
        one = Rank(epoch, rank, node_of, lines, address, token)
        watch(poll, watched, one)
        left += 1
    while left:
        for fd, _ in poll.poll():
            if fd not in watched:  # it was closed meanwhile
                continue
            one, act = watched[fd]
            was_over = one.is_over
            act()
            if one.server.error or one.store.lost:
                raise RuntimeError(str(one.server.error or one.store.lost))
            watch(poll, watched, one)
            left -= one.is_over and not was_over
    told.put(time.process_time() - start)  # type: ignore[attr-defined]
    told.close()  # type: ignore[attr-defined]
    told.join_thread()  # type: ignore[attr-defined]


def watch(poll: select.epoll, watched: dict[int, tuple[Rank, Callable[[], None]]], one: Rank) -> None:
    """Poll the descriptors that a rank waits for now."""
    wanted = {fd: (events, act) for fd, events, act in one.watches() if fd >= 0}
    for fd in one.watched.keys() - wanted.keys():
        del watched[fd]
        with contextlib.suppress(OSError):  # it was closed
            poll.unregister(fd)
    for fd, (events, act) in wanted.items():
        if fd not in one.watched:
            poll.register(fd, events)
        elif one.watched[fd] != events:
            poll.modify(fd, events)
        watched[fd] = (one, act)
    one.watched = {fd: events for fd, (events, _) in wanted.items()}


def allow_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(size: int, pipe: object, over: Event) -> None:
    """Run the store until the event is set."""
    allow_descriptors()
    store = KeyValueStore("127.0.0.1", limits=Limits(strangers=64 + 2 * size))
    pipe.send((store.address, store.token))  # type: ignore[attr-defined]
    most = keys = 0
    while not over.is_set():
        store.step(0.05)
        most, keys = max(most, store.connections), max(keys, len(store))
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pipe.send((time.process_time(), most, keys, len(store), mib))  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=512, help="number of nodes")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="ranks on each node")
    parser.add_argument("--segments", type=int, default=9, help="segments of a node's address: UCX has 9, libfabric 1")
    args = parser.parse_args()
    size, epoch = args.nodes * args.ranks_per_node, new_epoch_name(1)
    pipe, its = multiprocessing.Pipe()
    over, told = multiprocessing.Event(), multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(size, its, over))
    server.start()
    address, token = pipe.recv()
    start = time.perf_counter()
    shares = [
        [rank for rank in range(size) if rank // args.ranks_per_node % WORKERS == each] for each in range(WORKERS)
    ]
    workers = [
        multiprocessing.Process(target=work, args=(share, epoch, args, address, token, told)) for share in shares
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
    if any(worker.exitcode for worker in workers):
        server.kill()
        return 1
    cpu_s = sum(told.get(timeout=60) for _ in workers)
    took = time.perf_counter() - start
    over.set()
    server_s, most, keys, left, mib = pipe.recv()
    for process in (*workers, server):
        process.join(60)
    print(f"{size} ranks on {args.nodes} nodes: up after {took:.1f} s on {os.cpu_count()} cores")
    print(f"the store: {server_s:.2f} s, {mib:.0f} MiB, {most} connections, at most {keys} keys, {left} left")
    print(f"the ranks: {cpu_s:.1f} s, on one node {cpu_s / args.nodes * 1e3:.0f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
