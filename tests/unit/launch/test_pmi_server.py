"""Where MPI is told that ranks are while it starts, and that nothing breaks the server which tells it."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflash.launch.pmi_server import NodeEpoch, PmiServer, blocks, mapping, nodes_of


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


class Node:
    """The MPI processes of a node, as its agent sees them. ``fences``: what was said at each barrier."""

    def __init__(self, ranks: int):
        self.fences: list[tuple[int, dict[str, str]]] = []
        self.epoch = NodeEpoch("e1", [0] * ranks, ranks, lambda number, puts: self.fences.append((number, puts)))
        self.clients = [Client(self.epoch) for _ in range(ranks)]

    def close(self) -> None:
        for client in self.clients:
            client.close()


class Client:
    """An MPI process, as the server sees it."""

    def __init__(self, epoch: NodeEpoch):
        self.sock, its = socket.socketpair()
        self.sock.setblocking(False)
        self.server = PmiServer(its, epoch)

    def say(self, line: str) -> None:
        self.sock.sendall(line.encode() + b"\n")
        self.server.receive()

    def heard(self) -> str:
        """What has come since the last time."""
        with contextlib.suppress(BlockingIOError):
            return self.sock.recv(1 << 16).decode()
        return ""

    def ask(self, line: str) -> str:
        self.say(line)
        assert self.server.error is None, self.server.error
        return self.heard().removesuffix("\n")

    def close(self) -> None:
        self.server.close()
        self.sock.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(2)
    yield node
    node.close()


@pytest.fixture
def client(node: Node) -> Client:
    return node.clients[0]


def test_what_a_rank_puts_all_get_after_the_barrier_of_all_nodes(node: Node) -> None:
    one, other = node.clients
    get = "cmd=get kvsname=e1 key={}"
    assert one.ask("cmd=put kvsname=e1 key=a value=1") == "cmd=put_result rc=0 msg=success"
    assert one.ask("cmd=barrier_in") == "" and not node.fences
    assert other.ask("cmd=barrier_in") == "" and node.fences == [(1, {"a": "1"})]
    node.epoch.fenced(1, {"a": "1", "b": "of another node"})
    assert [client.heard() for client in node.clients] == ["cmd=barrier_out rc=0\n"] * 2
    assert other.ask(get.format("a")) == "cmd=get_result rc=0 msg=success value=1"
    assert one.ask(get.format("b")) == "cmd=get_result rc=0 msg=success value=of another node"
    assert one.ask(get.format("c")) == "cmd=get_result rc=-1 msg=key_not_found value=unknown"
    assert one.ask(get.format("PMI_process_mapping")) == "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"
    one.ask("cmd=put kvsname=e1 key=d value=2")
    for client in node.clients:
        client.ask("cmd=barrier_in")
    assert node.fences[1:] == [(2, {"d": "2"})], "only what is new"


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
    assert re.search(why, str(client.server.error))
    assert client.server.fileno() == -1


words = st.sampled_from([b"kvsname=e1", b"key=k", b"key=PMI_process_mapping", b"value=v", b"=", b"rc=0", b"value=\\"])
line = st.binary(max_size=60) | st.builds(
    lambda command, words: b" ".join([b"cmd=" + command, *words]),
    st.sampled_from([b"init", b"put", b"get", b"barrier_in", b"finalize", b"abort", b"get_maxes", b""]),
    st.lists(words | st.binary(max_size=10), max_size=4),
)


@settings(max_examples=60)
@given(st.lists(line, max_size=6))
def test_no_process_can_break_the_server(lines: list[bytes]) -> None:
    node = Node(2)
    client, other = node.clients
    try:
        client.sock.sendall(b"\n".join([*lines, b""]))
        client.server.receive()
        assert other.ask("cmd=put kvsname=e1 key=x value=y") == "cmd=put_result rc=0 msg=success"
    finally:
        node.close()
