"""Connections that say nothing: how many a port keeps, for how long, and what it does without descriptors."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_S, until

from mlflash.wireup.strangers import Strangers


class Service:
    """A service that knows whoever sends a byte."""

    def __init__(self, longest_s: float = PATIENCE_S, most: int = 3):
        self.selector = selectors.DefaultSelector()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.connections: list[socket.socket] = []
        self.strangers = Strangers(listener, self.selector, longest_s, self.drop, most)

    def made(self, sock: socket.socket) -> socket.socket:
        self.connections.append(sock)
        self.selector.register(sock, selectors.EVENT_READ, sock)
        return sock

    def drop(self, sock: socket.socket) -> None:
        self.connections.remove(sock)
        self.selector.unregister(sock)
        sock.close()
        self.strangers.closed(sock)

    def step(self) -> None:
        for key, _ in self.selector.select(0):
            if key.data is None:
                self.strangers.accept(self.made)
            elif key.data in self.connections:
                if key.data.recv(100):
                    self.strangers.known(key.data)
                else:
                    self.drop(key.data)
        self.strangers.look()


@pytest.fixture
def client() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as closed:
        yield closed


def connected(client: contextlib.ExitStack, service: Service) -> socket.socket:
    sock = client.enter_context(socket.create_connection(service.address, PATIENCE_S))
    before = len(service.connections)
    until(lambda: service.step() or len(service.connections) != before or is_closed(sock), "it is accepted")
    return sock


def is_closed(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0]) and not sock.recv(1, socket.MSG_PEEK)


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def ended(service: Service) -> None:
    for sock in list(service.connections):
        service.drop(sock)
    service.strangers.close()
    service.selector.close()


def test_the_oldest_that_says_nothing_gives_way_and_who_has_spoken_stays(client: contextlib.ExitStack) -> None:
    service = Service(most=2)
    known = connected(client, service)
    known.sendall(b"me")
    until(lambda: service.step() or not len(service.strangers), "it is known")
    silent = [client.enter_context(socket.create_connection(service.address, PATIENCE_S)) for _ in range(5)]
    until(lambda: service.step() or all(is_closed(sock) for sock in silent[:3]), "the oldest are closed")
    assert not any(is_closed(sock) for sock in (known, *silent[3:]))
    ended(service)


def test_without_a_descriptor_the_oldest_gives_its_own(client: contextlib.ExitStack) -> None:
    service = Service()
    silent, new = connected(client, service), client.enter_context(socket.create_connection(service.address))
    with no_descriptor():
        until(lambda: service.step() or is_closed(silent), "the oldest is closed")
        until(lambda: service.step() or len(service.connections) == 1, "the new one has come")
    assert not is_closed(new)
    ended(service)


def test_each_listener_is_in_the_table_of_guarantees() -> None:
    root = Path(__file__).parents[2]
    listens = re.compile(r"\.listen\(|create_server\(")
    files = {path.relative_to(root / "mlflash").as_posix(): path for path in (root / "mlflash").rglob("*.py")}
    files |= {path.relative_to(root).as_posix(): path for path in (root / "adapters").rglob("*.py")}
    found = {name for name, path in files.items() if listens.search(path.read_text())}
    table = (root / "docs" / "guarantees.md").read_text().partition("### Listeners")[2].partition("###")[0]
    # One only tries whether an address can be listened at.
    assert found - {"wireup/interfaces.py"} == set(re.findall(r"^\| `([\w/]+\.py)`", table, re.MULTILINE))
