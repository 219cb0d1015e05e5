"""What MPI asks for after a barrier comes from node to node, and to all of them where a node fails."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from waiting import PATIENCE_S

from mlflash.wireup.address_relay import FAN_OUT, LEAST_NODES, Watch
from mlflash.wireup.key_value_store import KeyValueStore
from mlflash.wireup.pmi_server import PmiServer
from mlflash.wireup.store_client import StoreClient
from mlflash.wireup.store_limits import Limits

NODES = 2 * FAN_OUT + LEAST_NODES  # three levels: 0, 1 to 16, and the others
EPOCH = "epoch-1-a"


class Rank:
    """A rank that starts MPI."""

    def __init__(self, store: KeyValueStore, rank: int, nodes: Sequence[int]):
        self.mpi, its = socket.socketpair()
        self.mpi.setblocking(False)
        self.store = StoreClient(store.address, store.token)
        self.server = PmiServer(its, EPOCH, rank, nodes, self.store)
        self.received = b""

    @property
    def own(self) -> KeyValueStore | None:
        return self.server._relay._own

    def watches(self) -> Iterator[Watch]:
        yield self.store.fileno(), self.store.events, self.store.step
        yield from self.server.watches()
        yield self.mpi.fileno(), select.POLLIN, self.hear

    def hear(self) -> None:
        self.received += self.mpi.recv(1 << 16)

    def say(self, words: str) -> None:
        self.mpi.sendall(f"cmd={words}\n".encode())

    def close(self) -> None:
        self.server.close()
        self.store.close()
        self.mpi.close()


class World:
    """All ranks, and the store of all."""

    def __init__(self, nodes: Sequence[int]):
        self.store = KeyValueStore(limits=Limits(strangers=len(nodes)))
        self.ranks = [Rank(self.store, rank, nodes) for rank in range(len(nodes))]
        self.gave = 0  # pages, by the store of all
        page = self.store._page

        def counted(prefix: str, after: str | None) -> bytes:
            self.gave += 1
            return page(prefix, after)

        self.store._page = counted  # type: ignore[method-assign]

    def until(self, is_so: Callable[[], object], ranks: Sequence[int] | None = None) -> None:
        """Do what is ready on all ranks or some, as zygotes do, until something is so."""
        end, driven = time.monotonic() + PATIENCE_S, [self.ranks[rank] for rank in ranks or range(len(self.ranks))]
        while not is_so():
            assert time.monotonic() < end
            watches = [watch for rank in driven for watch in rank.watches() if watch[0] >= 0]
            watches.append((self.store.fileno(), select.POLLIN, self.store.step))
            acts = {fd: act for fd, _, act in watches}
            poll = select.poll()
            for fd, events, _ in watches:
                poll.register(fd, events)
            for fd, _ in poll.poll(1000 * PATIENCE_S):
                acts[fd]()
            assert [rank.server.error for rank in self.ranks if rank.server.error] == []

    def answers(self, ranks: Sequence[int]) -> list[str]:
        """Wait until some have an answer, and take it."""

        self.until(lambda: all(self.ranks[rank].received.endswith(b"\n") for rank in ranks))
        found = [self.ranks[rank].received.decode().rstrip() for rank in ranks]
        for rank in ranks:
            self.ranks[rank].received = b""
        return found

    def all_say(self, say: Callable[[int], str], ranks: Sequence[int] | None = None) -> list[str]:
        ranks = range(len(self.ranks)) if ranks is None else ranks
        for rank in ranks:
            self.ranks[rank].say(say(rank))
        return self.answers(ranks)

    def put(self, *keys: str) -> None:
        """Have each rank put a value under each key and its number, and all come to a barrier."""
        for key in keys:
            self.all_say(lambda rank, key=key: f"put kvsname={EPOCH} key={key}-{rank} value={key}{rank}")  # type: ignore[misc]
        assert set(self.all_say(lambda rank: "barrier_in")) == {"cmd=barrier_out rc=0"}

    def get(self, key: str, of: int, ranks: Sequence[int] | None = None) -> None:
        """See that each gets the value that one has put."""
        found = self.all_say(lambda rank: f"get kvsname={EPOCH} key={key}-{of}", ranks)
        assert set(found) == {f"cmd=get_result rc=0 msg=success value={key}{of}"}

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.store.close()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(getattr(request, "param", range(NODES)))
    yield world
    world.close()


def test_the_store_of_all_gives_everything_to_the_first_nodes_only(world: World) -> None:
    world.put("a", "b")
    for of in (0, 1, 50, NODES - 1):
        world.get("a", of)
        world.get("b", of)
    assert world.gave == 1 + FAN_OUT
    with_own = [rank for rank, one in enumerate(world.ranks) if one.own is not None]
    assert with_own == list(range(-(-(NODES - 1) // FAN_OUT)))
    assert len(world.ranks[0].server._known or ()) == 2 * NODES


@pytest.mark.parametrize("how", ["gone", "full", "deaf"])
def test_where_a_node_fails_those_below_it_ask_the_store_of_all(world: World, how: str) -> None:
    own = world.ranks[1].own
    assert own is not None
    world.put("a")
    if how == "gone":
        own.close()
        world.ranks[1].server._relay._own = None
    elif how == "full":
        own.limits = Limits(keys=10)
    else:
        own.token = "0" * 32
    world.get("a", NODES - 1)
    assert world.gave == 1 + FAN_OUT + FAN_OUT
    world.put("b")
    world.get("b", 2)
