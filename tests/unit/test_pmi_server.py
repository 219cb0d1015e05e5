"""Where MPI is told that ranks are while it starts, and that nothing breaks the server which tells it."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from mlflash.wireup.key_value_store import KeyValueStore, listen
from mlflash.wireup.pmi_server import PmiServer
from mlflash.wireup.process_mapping import blocks, mapping, nodes_of
from mlflash.wireup.store_client import StoreClient


def read_as_mpich(text: str, size: int) -> list[int]:
    """The node of each rank as MPICH 5 reads it: MPL_rankmap_str_to_array, without what we never write."""
    triples = [tuple(map(int, found)) for found in re.findall(r"\((\d+),(\d+),(\d+)\)", text)]
    assert text == f"(vector,{','.join(f'({a},{b},{c})' for a, b, c in triples)})"
    nodes: list[int] = []
    again = next((number for number, triple in enumerate(triples) if triple[0] == 0), len(triples))
    while True:
        for node, count, ranks in triples:
            nodes += [node + i for i in range(count) for _ in range(ranks)]
            if len(nodes) >= size:
                return nodes[:size]
        triples = triples[again:]
        assert triples, "the mapping ends before the ranks do"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30) | st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_any_nodes_come_back(nodes: list[int]) -> None:
    first = list(dict.fromkeys(nodes))
    numbered = [first.index(node) for node in nodes]
    assert read_as_mpich(mapping(nodes), len(nodes)) == numbered
    assert nodes_of(blocks(nodes), len(nodes)) == numbered


class Client:
    """An MPI process of two on a node, as the server sees it, and the event loop that both stand in."""

    def __init__(self, store: KeyValueStore, rank: int):
        self.store = store
        self.asking = StoreClient(store.address, store.token)
        self.sock, its = socket.socketpair()
        self.sock.setblocking(False)
        self.server = PmiServer(its, "e1", rank, [0, 0], self.asking)
        self.received = b""

    def turn(self) -> None:
        self.store.step()
        self.asking.step()
        if self.server.fileno() >= 0:
            self.server.receive()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self.received += self.sock.recv(1 << 16)

    def say(self, line: str) -> None:
        self.sock.sendall(line.encode() + b"\n")

    def ask(self, line: str) -> str:
        self.say(line)
        until(lambda: self.turn() or b"\n" in self.received or self.server.error, "an answer")
        assert self.server.error is None, self.server.error
        answer, _, self.received = self.received.partition(b"\n")
        return answer.decode()

    def error(self) -> str:
        until(lambda: self.turn() or self.server.error, "an error")
        return str(self.server.error)

    def close(self) -> None:
        self.server.close()
        self.asking.close()
        self.sock.close()


@pytest.fixture
def client() -> Iterator[Client]:
    store = KeyValueStore(listen())
    client = Client(store, 0)
    yield client
    client.close()
    store.close()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("GET / HTTP/1.1", "words that are not key=value"),
        ("mcmd=spawn", "a line without a command"),
        ("cmd=launch_missiles", "an unknown command: launch_missiles"),
        (f"cmd=put kvsname=e1 key=k value={'v' * 1024}", "a value of 1024 characters"),
        ("cmd=barrier_in\ncmd=barrier_in", "barrier_in before the last command was answered"),
        ("cmd=abort exitcode=7 message=abort", r"MPI_Abort\(7\)"),
        ("cmd=barrier_in\ncmd=abort exitcode=3", r"MPI_Abort\(3\)"),
        ("cmd=abort exitcode=x", r"MPI_Abort\(1\)"),
    ],
)
def test_what_is_no_pmi_ends_the_process_that_sent_it(client: Client, line: str, why: str) -> None:
    client.say(line)
    assert re.search(why, client.error())
    assert client.server.fileno() == -1


line = st.binary(max_size=60) | st.builds(
    lambda command, words: b" ".join([b"cmd=" + command, *words]),
    st.sampled_from([b"init", b"put", b"get", b"barrier_in", b"finalize", b"abort", b"get_maxes", b""]),
    st.lists(
        st.sampled_from([b"kvsname=e1", b"key=k", b"key=PMI_process_mapping", b"value=v", b"=", b"rc=0", b"value=\\"])
        | st.binary(max_size=10),
        max_size=4,
    ),
)


@settings(max_examples=60)
@given(st.lists(line, max_size=6))
def test_no_process_can_break_the_server(lines: list[bytes]) -> None:
    store = KeyValueStore(listen())
    client, other = Client(store, 0), Client(store, 1)
    try:
        client.sock.sendall(b"\n".join([*lines, b""]))
        for _ in range(5):
            client.turn()
        assert other.ask("cmd=put kvsname=e1 key=x value=y") == "cmd=put_result rc=0 msg=success"
    finally:
        client.close()
        other.close()
        store.close()
