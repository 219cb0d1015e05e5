"""Lines of JSON between processes: any bytes, a port that strangers reach, and a client of many threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from introduced import introduce
from waiting import PATIENCE_S, until

from mlflash.errors import DeadlineExceeded
from mlflash.launch import handshake
from mlflash.launch.handshake import Port
from mlflash.launch.line_client import LineClient, Lost, Refused
from mlflash.launch.lines import BadLine, Connection, Lines, listener_at, pack

TOKEN = "t" * 32
messages = st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)  # fmt: skip


@given(st.lists(messages, max_size=5), st.integers(1, 40))
def test_messages_come_back_in_whatever_pieces_they_arrive(sent: list[Any], piece: int) -> None:
    stream = b"".join(map(pack, sent))
    lines = Lines(1 << 20)
    pieces = [stream[at : at + piece] for at in range(0, len(stream), piece)]
    assert [message for one in pieces for message in lines.add(one)] == sent


@given(st.binary(max_size=80))
def test_bytes_are_messages_or_refused(received: bytes) -> None:
    with contextlib.suppress(BadLine):
        for message in Lines(60).add(received):
            json.dumps(message)


def test_of_a_message_that_is_too_long_no_more_is_kept_than_its_beginning() -> None:
    lines = Lines(100)
    with pytest.raises(BadLine, match="more than 100 bytes"):
        for _ in range(3):
            list(lines.add(b"x" * 60))
    with pytest.raises(BadLine, match="more than 100 bytes"):
        list(Lines(100).add(b'"' + b"x" * 200 + b'"\n'))


class Echo:
    """A port in a thread, which answers questions; ``heard``: what it was told."""

    def __init__(self, **limits: Any):
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self.connections: list[Connection] = []
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(limits)), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    async def _serve(self, limits: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.port = Port(TOKEN, self._known, 1 << 20, **limits)
        await self.port.listen(listener_at())
        self._ready.set()
        await self._over.wait()
        self.port.close()

    def _known(self, connection: Connection, hello: dict[str, Any]) -> None:
        self.connections.append(connection)
        connection.heard = lambda message: self._answer(connection, message)
        connection.lost = self.lost.append

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        self.heard.append(message)
        match message["do"]:
            case "add":
                connection.send({"id": message["id"], "is": sum(message["numbers"])})
            case "refuse":
                connection.send({"id": message["id"], "error": "no", "lost": True})
            case "news":
                connection.send({"news": message["text"]})
            case "leave":
                connection.end()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.port.address, PATIENCE_S)

    def client(self, heard: Callable[[dict[str, Any]], None] = lambda message: None) -> LineClient:
        sock = self.connect()
        introduce(sock, TOKEN)
        return LineClient(sock, "the echo", heard)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE_S)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


NONCE = pack({"nonce": "n"})


@pytest.mark.parametrize("sent", [
    pack({"token": TOKEN}), pack([TOKEN]), pack({"nonce": 7}), pack({}), b"GET / HTTP/1.1\r\n\r\n", b"x" * 9999, b"\n",
    NONCE + pack({"proof": "0" * 64}), NONCE + pack({"proof": None}), NONCE + pack({"proof": "\N{SNOWMAN}"}),
    NONCE + pack({}), NONCE + NONCE, NONCE + pack([]),
])  # fmt: skip
def test_who_does_not_prove_to_know_the_token_is_closed(echo: Echo, sent: bytes) -> None:
    with echo.connect() as sock:
        sock.sendall(sent)
        heard = sock.makefile("rb").readlines() if sent.startswith(NONCE) else []
        assert len(heard) == sent.startswith(NONCE) and is_closed(sock)
    client = echo.client()
    assert client.ask("add", PATIENCE_S, numbers=[1, 2]) == 3
    client.close()


async def _introduced(address: tuple[str, int], token: str) -> Connection:
    connection = Connection(lambda message: None, lambda why: None, 1 << 20)
    await asyncio.get_running_loop().create_connection(lambda: connection, *address)
    await asyncio.wait_for(handshake.introduce(connection, token, who="me"), PATIENCE_S)
    return connection


def test_a_process_tells_whoever_does_not_know_its_token_nothing(echo: Echo) -> None:
    with pytest.raises(ConnectionRefusedError, match="it does not know the token"):
        asyncio.run(_introduced(echo.port.address, "u" * 32))
    assert not echo.connections


@pytest.mark.parametrize("answer", [b"", b"\n", pack(7), pack({"nonce": "n"}), pack({"nonce": "n", "proof": 1}),
                                    pack({"proof": "0" * 64}), pack({"nonce": [], "proof": "0" * 64}),
                                    pack({"nonce": "\ud800", "proof": "x"}),
                                    pack({"nonce": "n", "proof": "\ud800"})])  # fmt: skip
def test_a_thief_at_a_known_port_learns_only_a_nonce(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        introduced = threads.submit(lambda: asyncio.run(_introduced(listener.getsockname(), TOKEN)))
        thief, _ = listener.accept()
        with thief, thief.makefile("rb") as heard:
            assert json.loads(heard.readline()).keys() == {"nonce"}
            thief.sendall(answer)
            thief.shutdown(socket.SHUT_WR)
            assert heard.read() == b""
        with pytest.raises(ConnectionError):
            introduced.result(PATIENCE_S)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_proofs_that_somebody_passes_on_from_elsewhere_are_refused(echo: Echo, address: str) -> None:
    """``address``: with another port, or with the same port of another address of the host."""
    at = (address, 0 if address == echo.port.address[0] else echo.port.address[1])
    with socket.create_server(at) as listener, ThreadPoolExecutor(1) as threads:
        introduced = threads.submit(lambda: asyncio.run(_introduced(listener.getsockname(), TOKEN)))
        thief, _ = listener.accept()
        with thief, thief.makefile("rb") as heard, echo.connect() as port, port.makefile("rb") as answered:
            port.sendall(heard.readline())
            thief.sendall(answered.readline())
            assert heard.read() == b""
        with pytest.raises(ConnectionRefusedError):
            introduced.result(PATIENCE_S)
    assert not echo.connections


def test_a_connection_that_is_reset_at_once_is_a_connection_error() -> None:
    connection = Connection(lambda message: None, lambda why: None, 1 << 20)

    async def meet(address: tuple[str, int], listener: socket.socket) -> None:
        sock = socket.create_connection(address)
        stranger, _ = listener.accept()
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        stranger.close()  # with a reset
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
        await handshake.introduce(connection, TOKEN)

    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConnectionError):
        asyncio.run(meet(listener.getsockname(), listener))
    assert not connection.is_open


def test_a_thousand_silent_strangers_keep_nobody_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    echo = Echo(strangers=8, stranger_s=PATIENCE_S)
    strangers = [echo.connect() for _ in range(1000)]
    try:
        client = echo.client()
        assert client.ask("add", PATIENCE_S, numbers=[1, 2]) == 3
        client.close()
        assert sum(map(is_closed, strangers[:900])) == 900, "only so many at a time"
    finally:
        for stranger in strangers:
            stranger.close()
        echo.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stranger_has_only_so_long() -> None:
    echo = Echo(stranger_s=0.05)
    with echo.connect() as sock:
        assert is_closed(sock)
    known = echo.client()
    with echo.connect() as sock:
        assert is_closed(sock)
    assert known.ask("add", PATIENCE_S, numbers=[1]) == 1, "who has proved to know the token stays"
    known.close()
    echo.close()


def test_many_threads_ask_over_one_connection_and_news_comes_in_between(echo: Echo) -> None:
    news: list[dict[str, Any]] = []
    client = echo.client(news.append)
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda n: client.ask("add", PATIENCE_S, numbers=[n, 1]), range(200))
        client.say({"do": "news", "text": "x"})
        assert list(answers) == [n + 1 for n in range(200)]
    until(lambda: news == [{"news": "x"}], "the news")
    client.close()


def test_each_wait_ends_by_its_deadline_a_refusal_a_check_or_the_end_of_the_connection(echo: Echo) -> None:
    client = echo.client()
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for the echo to answer: nothing"):
        client.ask("nothing", 0.05)
    with pytest.raises(Refused, match="no") as refused:
        client.ask("refuse", PATIENCE_S)
    assert refused.value.answer["lost"] is True

    def check() -> None:
        raise RuntimeError("useless")

    with pytest.raises(RuntimeError, match="useless"):
        client.ask("nothing", PATIENCE_S, check)
    with pytest.raises(Lost, match="the echo has ended"):
        client.ask("leave", PATIENCE_S)
    with pytest.raises(Lost, match="the echo has ended"):
        client.ask("add", PATIENCE_S, numbers=[])
    client.close()


def test_what_makes_no_sense_ends_its_connection_only(echo: Echo) -> None:
    one, other = echo.client(), echo.client()
    one.say({"no": "do"})
    until(lambda: bool(echo.lost), "the end of that connection")
    assert "senseless" in echo.lost[0]
    assert other.ask("add", PATIENCE_S, numbers=[2]) == 2
    for client in (one, other):
        client.close()
