"""The store through which processes find each other: its answers, its waits, and that nobody can hurt it."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from waiting import PATIENCE_S, is_in, until

from mlflash.errors import DeadlineExceeded
from mlflash.wireup.epoch_agreement import EpochAgreement
from mlflash.wireup.frames import pack
from mlflash.wireup.key_value_store import KeyValueStore, listen
from mlflash.wireup.store_client import StoreClient, StoreLost


class Served:
    """A store that a thread drives."""

    def __init__(self, **limits: Any):
        self.store = KeyValueStore(listen(), **limits)
        self.clients: list[StoreClient] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self.store.step(0.02)

    def client(self) -> StoreClient:
        self.clients.append(StoreClient(self.store.address, self.store.token))
        return self.clients[-1]

    def stranger(self, *sent: bytes) -> socket.socket:
        sock = socket.create_connection(self.store.address, PATIENCE_S)
        with contextlib.suppress(ConnectionError):  # the store may close it before it has read everything
            sock.sendall(b"".join(sent))
        return sock

    def known(self, *sent: bytes) -> socket.socket:
        return self.stranger(pack(self.store.token), *sent)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.store.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """One store for all examples, with a client that stays."""
    served = Served()
    served.client()
    yield served
    until(lambda: served.store.connections == 1, "all others are gone")
    assert not served.store._strangers
    served.close()


def is_closed(sock: socket.socket) -> bool:
    """Wait for the other side to close a connection, and close this one."""
    with sock:
        try:
            return sock.recv(1) == b""
        except ConnectionError:
            return True


def test_a_get_waits_for_the_key_and_no_longer_than_it_was_told(served: Served) -> None:
    client, got = served.client(), []
    waiter = threading.Thread(target=lambda: got.append(served.client().get("late", PATIENCE_S)))
    waiter.start()
    until(lambda: is_in(waiter, StoreClient._ask), "it waits")
    with pytest.raises(
        DeadlineExceeded, match=r"waited 0\.05 s for the key-value store at 127\.0\.0\.1 port \d+ .*get never"
    ):
        client.get("never", 0.05)
    client.put("never", "too late", PATIENCE_S)
    assert client.get("never", PATIENCE_S) == "too late", "the one given up is not answered in its place"
    client.put("late", "now", PATIENCE_S)
    waiter.join(PATIENCE_S)
    assert got == ["now"]
    until(lambda: not served.store._waiting, "nothing waits any more")


def test_a_wrong_token_closes_the_connection(served: Served) -> None:
    for first in ("0" * 32, "", served.store.token[:-1], served.store.token + "0", 7, None, [served.store.token], "ü",
                  "\udc80"):  # fmt: skip
        assert is_closed(served.stranger(pack(first), pack([1, "put", "a", "b"])))
    with pytest.raises(StoreLost):
        StoreClient(served.store.address, "f" * 32).ping(PATIENCE_S)
    assert len(served.store) == 0


@settings(max_examples=60)
@given(st.binary(min_size=5, max_size=300))
@example(b"\xff\xff\xff\xff" + b"x" * 10)
@example(b"GET / HTTP/1.1\r\n\r\n")
@example(pack("x" * 32)[:-1] + b"\xff")
def test_garbage_of_a_stranger_closes_its_connection_and_no_other(shared: Served, garbage: bytes) -> None:
    finish(shared.stranger(garbage))
    assert shared.clients[0].add("alive", 1, PATIENCE_S) > 0


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)
words = st.sampled_from(
    ["put", "get", "look", "below", "add", "delete", "cancel", "ping", "a", "b", "", 0, 1, 2**60, True, -1, None]
)


@settings(max_examples=100)
@given(st.lists(anything | st.lists(words | anything, max_size=5), max_size=5))
@example([[1, "get", "nothing"], [1, "get", "nothing"]])
@example([[1, "get", "nothing"], [1, "cancel", 1], [1, "cancel", 1]])
@example([[1, "put", "a", "x"], [2, "add", "a", 1]])
@example([[1, "put", "a", "x" * (1 << 20)]])
@example([[1, "add", "a", 10**4000], [1, "add", "a", 10**4300 - 1]])
def test_what_a_client_sends_wrongly_hurts_no_other(shared: Served, messages: list[Any]) -> None:
    finish(shared.known(*map(pack, messages)))
    assert shared.clients[0].add("alive", 1, PATIENCE_S) > 0


def finish(sock: socket.socket) -> None:
    """Say that nothing more will come, and wait for the connection to be closed."""
    with sock, contextlib.suppress(OSError):  # it was closed before
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


operations = st.lists(
    st.tuples(st.just("put"), st.sampled_from(["a", "ab", "b", "b/c"]), st.sampled_from(["0", "7", "-2"]))
    | st.tuples(st.just("add"), st.sampled_from(["a", "ab", "b", "b/c"]), st.integers(-3, 3))
    | st.tuples(st.sampled_from(["look", "below", "delete"]), st.sampled_from(["a", "ab", "b", "b/"])),
    max_size=20,
)


@settings(max_examples=60)
@given(operations)
def test_it_holds_what_a_dictionary_would(shared: Served, todo: list[tuple[Any, ...]]) -> None:
    client, model = shared.clients[0], {}
    client.put("a", "", PATIENCE_S)
    for prefix in ("a", "b"):
        client.delete(prefix, PATIENCE_S)
    for operation, key, *more in todo:
        if operation == "put":
            client.put(key, *more, PATIENCE_S)
            model[key] = more[0]
        elif operation == "look":
            assert client.look(key, PATIENCE_S) == model.get(key)
        elif operation == "below":
            found = {name.removeprefix(key): value for name, value in model.items() if name.startswith(key)}
            assert client.below(key, PATIENCE_S) == found
        elif operation == "delete":
            gone = {name for name in model if name.startswith(key)}
            assert client.delete(key, PATIENCE_S) == len(gone)
            model = {name: value for name, value in model.items() if name not in gone}
        else:
            model[key] = str(int(model.get(key, "0")) + more[0])
            assert client.add(key, more[0], PATIENCE_S) == int(model[key])


def test_strangers_that_stay_silent_keep_nobody_out_and_are_closed() -> None:
    served = Served(strangers=3)
    try:
        silent = [served.stranger() for _ in range(3)]
        client = served.client()
        client.ping(PATIENCE_S)
        more = [served.stranger(b"\x00") for _ in range(3)]
        assert all(is_closed(sock) for sock in silent)
        client.ping(PATIENCE_S)
        assert served.store.connections == 4
        for sock in more:
            sock.close()
    finally:
        served.close()
    served = Served(stranger_s=0.1)
    assert is_closed(served.stranger(b"\x00\x00"))
    served.close()


def test_it_sleeps_where_no_descriptor_is_left_and_accepts_again() -> None:
    """But first the oldest that has not said who it is gives its own."""
    store = KeyValueStore(listen())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, silent = (socket.create_connection(store.address) for _ in range(2))
    first.sendall(pack(store.token) + pack([1, "ping"]))
    until(lambda: store.step() or (store.connections == 2 and select.select([first], [], [], 0)[0]), "both are there")
    second = socket.create_connection(store.address)
    try:
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        until(lambda: store.step() or select.select([silent], [], [], 0)[0], "the oldest is closed")
        assert is_closed(silent)
        until(lambda: store.step() or store.connections == 2, "the second is there")
        second.sendall(pack(store.token))
        third = socket.create_connection(store.address)
        until(lambda: store.step() or not len(store._strangers), "it has said who it is, and no descriptor is left")
        store.step()
        assert not select.select([store], [], [], 0)[0], "it would never sleep"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    first.close()
    third.sendall(pack(store.token) + pack([1, "ping"]))
    until(lambda: store.step() or bool(select.select([third], [], [], 0)[0]), "an answer")
    assert third.recv(100) == pack([1, True])
    second.close()
    third.close()
    store.close()
    store.close()


def test_a_rank_that_waits_for_an_epoch_that_was_lost_with_its_store_comes_to_the_next_one(served: Served) -> None:
    def rank(number: int) -> EpochAgreement:
        return EpochAgreement(number, 2, "n", "", served.store.address, served.store.token, end, lambda: None)

    end = time.monotonic() + PATIENCE_S
    with contextlib.closing(rank(0)) as first, contextlib.closing(rank(1)) as second, ThreadPoolExecutor() as pool:
        late = pool.submit(second.agree, 1, end, PATIENCE_S)  # rank 0 had heard of this epoch before the store ended
        agreed = pool.submit(first.agree, 2, end, PATIENCE_S)
        assert late.result(PATIENCE_S) is None
        assert second.agree(2, end, PATIENCE_S) == agreed.result(PATIENCE_S)
