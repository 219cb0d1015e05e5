"""Simulates how thousands of couriers find each other: the requests of MPI to our PMI-1 servers, and one hub.

Hub, connections and PMI servers are those of mlflash's agents, and talk over loopback. The hub has its own process, as
the agent of rank 0 is one. The requests are those of MPICH 5.0.2. On each node one rank puts its address, in segments
of a kilobyte: one with libfabric, 9 with UCX. All ranks enter a barrier. Then that rank gets the addresses of all
nodes. In a real start all ranks wait for the hub's process. The other work is spread over all nodes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

from mlflash.launch.hub import Hub
from mlflash.launch.hub_connection import Epoch, HubConnection, HubLost
from mlflash.launch.lines import listener_at
from mlflash.launch.pmi_server import PmiServer
from mlflash.launch.rendezvous import new_token

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
    """One rank: what its node's agent has of it, and the MPI of its courier. ``up``: called when that has started."""

    def __init__(self, rank: int, nodes: int, per_node: int, segments: int, up: Callable[[], None]):
        self.rank, self.member, self.error = rank, f"member {rank}", ""
        self._of = rank // per_node, rank % per_node == 0, nodes, segments
        self._up, self._received = up, b""

    def join(self, world: HubConnection) -> None:
        world.tell("join", rank=self.rank, last=0, facts=[f"node {self._of[0]}", "", []])

    def begin(self, begun: Epoch) -> None:
        """Start the MPI of its courier."""
        assert begun.here is not None
        server, self._mpi = socket.socketpair()
        self._server, self._here = PmiServer(server, begun.here), begun.here
        self._lines = lines_of(begun.name, *self._of)
        self._mpi.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(server, self._server.receive)
        loop.add_reader(self._mpi, self._hear)
        self._ask()

    def _ask(self) -> None:
        line = next(self._lines, None)
        if line is not None:
            self._mpi.sendall(f"cmd={line}\n".encode())
            return
        loop = asyncio.get_running_loop()
        for sock in (self._server, self._mpi):
            loop.remove_reader(sock)
            sock.close()
        self._here.initialized()
        self._up()

    def _hear(self) -> None:
        self._received += self._mpi.recv(1 << 16)
        if self._received.endswith(b"\n"):
            assert b"rc=-1" not in self._received and b"rc=1" not in self._received, self._received
            self._received = b""
            self._ask()

    def over(self, epoch: str) -> None:
        """See `mlflash.launch.seat.Seat`: other nodes may end before this one."""

    def departed(self, departure: dict[str, Any]) -> None:
        raise RuntimeError(str(departure))

    def hub_lost(self, lost: HubLost) -> None:
        """See `mlflash.launch.seat.Seat`."""


class Start(NamedTuple):
    """What a start took.

    Attributes:
        seconds: time until all ranks were up.
        hub_s, hub_mib: CPU time and memory of the hub.
        node_s: CPU time of the agent of one node.
    """

    seconds: float
    hub_s: float
    hub_mib: float
    node_s: float


def wire_up(nodes: int, per_node: int, segments: int = 1) -> Start:
    """Start all ranks at once."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pipe, hub_pipe = multiprocessing.Pipe()
    is_over, worker_seconds = multiprocessing.Event(), multiprocessing.SimpleQueue()  # type: ignore[var-annotated]
    hub = multiprocessing.Process(target=lambda: asyncio.run(serve(nodes * per_node, hub_pipe, is_over)))
    hub.start()
    address, token = pipe.recv()
    start = time.perf_counter()

    def work(worker: int) -> None:
        cpu_start = time.process_time()
        asyncio.run(run_nodes(range(worker, nodes, WORKERS), nodes, per_node, segments, address, token))
        worker_seconds.put(time.process_time() - cpu_start)

    workers = [multiprocessing.Process(target=work, args=(worker,)) for worker in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    seconds = time.perf_counter() - start
    is_over.set()
    hub_s, hub_mib = pipe.recv()
    hub.join(PATIENCE_S)
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("the ranks did not come up")
    ranks_s = sum(worker_seconds.get() for _ in workers)
    return Start(seconds, hub_s, hub_mib, ranks_s / nodes)


async def run_nodes(facts: range, nodes: int, per_node: int, segments: int, address: tuple[str, int], token: str
                    ) -> None:  # fmt: skip
    """Run some nodes until their ranks are up."""
    left, up = len(facts) * per_node, asyncio.Event()

    def note() -> None:
        nonlocal left
        left -= 1
        if not left:
            up.set()

    worlds = []
    for node in facts:
        world = HubConnection(address, token, nodes * per_node, lambda world: None)
        worlds.append(world)
        ranks = [Rank(node * per_node + local, nodes, per_node, segments, note) for local in range(per_node)]
        for rank in ranks:
            await world.enter(rank)  # type: ignore[arg-type]
            rank.join(world)
    await up.wait()


async def serve(size: int, pipe: Any, is_over: Event) -> None:
    """Be the hub until the event is set."""
    hub = Hub(size, new_token())
    await hub.listen(listener_at())
    pipe.send((hub.address, hub.token))
    while not is_over.is_set():
        await asyncio.sleep(0.05)
    hub.close()
    pipe.send((time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
