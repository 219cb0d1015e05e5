"""The wire-up of thousands of couriers, simulated: what MPI asks of our PMI-1 servers while it starts, over one store.

    python benchmarks/scale/wireup.py [--nodes 512] [--ranks-per-node 8] [--segments 9]

Store, its clients and the PMI servers are those of mlflash, and talk over loopback; the store has a process of its own,
as rank 0's zygote is. What MPI asks is played by its lines, as MPICH 5.0.2 with UCX sends them: on each node one rank
puts its address, in segments of a kilobyte, all ranks come to a barrier, and that rank gets the addresses of all nodes.
The time of the store's process is what a real start waits for; that of the others is spread over all nodes there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event

from mlflash.wireup.key_value_store import KeyValueStore, Limits
from mlflash.wireup.pmi_server import PmiServer, new_epoch_name
from mlflash.wireup.store_client import StoreClient

WORKERS = 2
SEGMENT = "F" * 1000


def lines_of(epoch: str, node: int, is_first: bool, nodes: int, segments: int) -> Iterator[str]:
    """What the MPI of one rank asks, a line at a time."""
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
    """One rank: what its zygote has for it, and the MPI that talks to that."""

    def __init__(
        self, epoch: str, rank: int, node_of: list[int], lines: Iterator[str], address: tuple[str, int], token: str
    ):
        mine, its = socket.socketpair()
        self.store = StoreClient(address, token)
        self.server = PmiServer(mine, epoch, rank, node_of, self.store)
        self.mpi, self._lines, self._is_up = its, lines, False
        self._received = b""
        its.setblocking(False)
        self.ask()

    @property
    def is_over(self) -> bool:
        """Whether MPI is up, and the store has done all that it was asked for."""
        return self._is_up and not self.store._then

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
    """Be all ranks of some nodes."""
    allow_descriptors()
    size = args.nodes * args.ranks_per_node
    node_of = [rank // args.ranks_per_node for rank in range(size)]
    selector, left = selectors.EpollSelector(), 0
    start = time.process_time()
    for rank in mine:
        lines = lines_of(epoch, node_of[rank], rank % args.ranks_per_node == 0, args.nodes, args.segments)
        one = Rank(epoch, rank, node_of, lines, address, token)
        selector.register(one.mpi, selectors.EVENT_READ, (one, one.hear))
        selector.register(one.server, selectors.EVENT_READ, (one, one.server.receive))
        selector.register(one.store, selectors.EVENT_READ | selectors.EVENT_WRITE, (one, one.store.step))
        left += 1
    while left:
        for key, _ in selector.select():
            one, act = key.data
            was_over = one.is_over
            act()
            if one.server.error or one.store.lost:
                raise RuntimeError(str(one.server.error or one.store.lost))
            if key.fileobj is one.store:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.store.events & 4 else 0)
                if key.events != events:
                    selector.modify(one.store, events, key.data)
            elif one.store.events & 4:
                selector.modify(one.store, selectors.EVENT_READ | selectors.EVENT_WRITE, (one, one.store.step))
            left -= one.is_over and not was_over
    told.put(time.process_time() - start)  # type: ignore[attr-defined]
    told.close()  # type: ignore[attr-defined]
    told.join_thread()  # type: ignore[attr-defined]


def allow_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(size: int, pipe: object, over: Event) -> None:
    """Be the store, until it is over."""
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
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--segments", type=int, default=9, help="of the address of a node: UCX has 9, libfabric 1")
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
    cpu_s = sum(told.get(timeout=600) for _ in workers)
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
