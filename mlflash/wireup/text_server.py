"""A text that rank 0 gives to the other ranks of its launch, over a socket at a place that all know.

Rank 0 listens on the first of a few addresses that is free. The other ranks try them in the same order until one
answers as rank 0 does. Messages are those of `frames`: a rank that connects sends ``["mlflash rendezvous", launch,
rank]``, rank 0 answers ``["mlflash rendezvous", launch, text]``, and the rank confirms with ``"got"``. ``launch``
distinguishes launches that use the same address; it is no secret. With other programs that listen there or connect,
nothing more is exchanged.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DeadlineExceeded, WorldMismatch
from .frames import BadFrame, Frames, pack
from .strangers import Strangers

Connect = Callable[[float], socket.socket]
"""Connects to one address within a number of seconds, or raises OSError."""

_GREETING = "mlflash rendezvous"
_LARGEST_NBYTES = 4096
_ANSWER_S = 2.0  # limit for a new connection to send its request, and for an answer to arrive
_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2


def serve(listener: socket.socket, launch: str, size: int, text: str, timeout_s: float) -> None:
    """Give a text to all other ranks, once each, and return when all have it. Collective, with `ask` on the others.

    Args:
        listener: a socket that listens; it is closed at the end.
        launch: a text that only this launch has.
        size: number of ranks.
        text: the text to give.
        timeout_s: how long it may take, in seconds.

    Raises:
        DeadlineExceeded: some ranks have not come; it names them.
    """
    served = _Served(listener, launch, size, text)
    end = time.monotonic() + timeout_s
    try:
        while len(served.got) < size - 1:
            if time.monotonic() >= end:
                missing = sorted({*range(1, size)} - served.got)
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for the other ranks to ask rank 0 where its key-value store is: "
                    f"{len(missing)} of {size} have not come",
                    rank=0,
                    ranks=missing,
                )
            served.step(end - time.monotonic())
    finally:
        served.close()


class _Connection:
    def __init__(self, sock: socket.socket):
        self.sock, self.frames = sock, Frames(_LARGEST_NBYTES)
        self.rank: int | None = None  # once it has said so


class _Served:
    def __init__(self, listener: socket.socket, launch: str, size: int, text: str):
        self.got: set[int] = set()
        self._launch, self._size, self._text = launch, size, text
        self._connections: dict[_Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._strangers = Strangers(listener, self._selector, _ANSWER_S, self._drop)

    def step(self, timeout_s: float) -> None:
        for ready, _ in self._selector.select(min(timeout_s, _ANSWER_S if self._connections else timeout_s)):
            connection: _Connection | None = ready.data
            if connection is None:
                self._strangers.accept(self._made)
                continue
            try:
                self._receive(connection)
            except (OSError, BadFrame):
                self._drop(connection)
        self._strangers.look()

    def close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._strangers.close()
        self._selector.close()

    def _made(self, sock: socket.socket) -> _Connection:
        connection = _Connection(sock)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:  # an earlier event may have dropped it
            del self._connections[connection]
            self._selector.unregister(connection.sock)
            connection.sock.close()
            self._strangers.closed(connection)

    def _receive(self, connection: _Connection) -> None:
        received = connection.sock.recv(_LARGEST_NBYTES)
        if not received:
            raise ConnectionResetError
        connection.frames.add(received)
        for message in connection.frames.messages():
            match message:
                case [str(greeting), self._launch, int(rank)] if greeting == _GREETING and 0 < rank < self._size:
                    connection.rank = rank
                    self._strangers.known(connection)
                    connection.sock.sendall(pack([_GREETING, self._launch, self._text]))
                case "got" if connection.rank is not None:
                    self.got.add(connection.rank)
                case _:
                    raise BadFrame("a request of no rank of this launch")


def ask(addresses: Sequence[Connect], where: str, launch: str, rank: int, timeout_s: float) -> str:
    """Ask rank 0 for its text until it answers. Collective, with `serve` on rank 0.

    Args:
        addresses: where rank 0 may listen, in the order in which it tries them.
        where: these addresses, in words.
        launch: a text that only this launch has.
        rank: of this process.
        timeout_s: how long it may take, in seconds.

    Raises:
        DeadlineExceeded: rank 0 has not answered.
    """
    end = time.monotonic() + timeout_s
    pause_s, why = _PAUSE_S, "it was not tried"
    while True:
        for connect in addresses:
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for rank 0 to say where its key-value store is, {where}; last: {why}",
                    rank=rank,
                    ranks=[0],
                )
            try:
                return _ask_once(connect, launch, rank, min(left, _ANSWER_S))
            except (OSError, BadFrame) as error:
                why = str(error) or type(error).__name__
        time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _ask_once(connect: Connect, launch: str, rank: int, timeout_s: float) -> str:
    end = time.monotonic() + timeout_s
    with connect(timeout_s) as sock:
        sock.settimeout(timeout_s)
        sock.sendall(pack([_GREETING, launch, rank]))
        frames = Frames(_LARGEST_NBYTES)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("what listens there does not answer")
            sock.settimeout(left)
            received = sock.recv(_LARGEST_NBYTES)
            if not received:
                raise ConnectionResetError("what listens there does not know this launch")
            frames.add(received)
            for message in frames.messages():
                text = _text(message, launch)
                sock.sendall(pack("got"))
                return text


def _text(message: Any, launch: str) -> str:
    match message:
        case [str(greeting), str(other), str(text)] if greeting == _GREETING and other == launch:
            return text
    raise BadFrame("what listens there is not rank 0 of this launch")


def listen(attempts: Sequence[Callable[[], socket.socket]], where: str) -> socket.socket:
    """Listen on the first address that is free. Raises WorldMismatch if none is free."""
    why = ""
    for attempt in attempts:
        try:
            return attempt()
        except OSError as error:
            why = str(error)
    raise WorldMismatch(f"rank 0 cannot listen {where}, where the other ranks look for it: {why}", rank=0)
