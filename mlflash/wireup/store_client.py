"""A client of the key-value store, with calls that wait up to a deadline and requests that an event loop drives.

`send` never waits. `step` calls the given function when the answer has arrived or the connection is lost. `put`, `get`
and the like do both and wait.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from ..errors import DeadlineExceeded
from .frames import BadFrame, Frames, pack, send_ready

Then = Callable[[Any, OSError | None], None]
"""A function that gets the answer, or the error."""

_LARGEST_NBYTES = 1 << 26
_LOOK_S = 1.0  # between two checks whether a wait is useless


class StoreLost(ConnectionError):
    """The key-value store cannot be reached, or no longer."""


class StoreClient:
    """A connection to the store. Close it; it may be closed twice.

    The constructor does not wait for the connection: the first answer shows that it works. One thread uses it.

    Args:
        address: host and port, or the path of a socket. If nothing may wait, the host must be numeric.
        check: called from time to time while a call waits; what it raises ends the wait. A host that has vanished
            closes no connection.
    """

    def __init__(self, address: tuple[str, int] | str, token: str, check: Callable[[], None] = lambda: None):
        self.address, self.token, self._check = address, token, check
        self.lost: StoreLost | None = None
        self._frames = Frames(_LARGEST_NBYTES)
        self._unsent = bytearray(pack(token))
        self._then: dict[int, Then] = {}
        self._number = 0
        self._is_connected = False
        where: Any = address
        if isinstance(address, str):
            self._place = address
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            self._place = f"{address[0]} port {address[1]}"
            family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            self._sock = socket.socket(family, kind, protocol)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setblocking(False)
        failed = self._sock.connect_ex(where)
        if failed not in (0, errno.EINPROGRESS):
            self._lose(os.strerror(failed))

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """The events of select.poll to wait for; 0 if there is no connection any more."""
        if self.lost is not None:
            return 0
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, then: Then, *operation: Any) -> int:
        """Send a request to the store; `step` calls ``then`` with the answer.

        Returns:
            The number of the message.
        """
        self._number += 1
        if self.lost is not None:
            then(None, self.lost)
            return self._number
        self._then[self._number] = then
        self._unsent += pack([self._number, *operation])
        if self._is_connected:
            self._flush()
        return self._number

    def step(self) -> None:
        """Send and receive as much as possible without waiting."""
        if self.lost is not None:
            return
        if not self._is_connected:
            self._connect()
        if self._is_connected:
            self._flush()
            self._receive()

    def close(self) -> None:
        """Close the connection. Open requests get no answer."""
        self._then.clear()
        self._lose("it was closed")

    # Calls that wait

    def put(self, key: str, value: str, timeout_s: float) -> None:
        """Set the value of a key. Raises DeadlineExceeded: the store may still set it."""
        self._ask(timeout_s, "put", key, value)

    def get(self, key: str, timeout_s: float) -> str:
        """Wait until a key exists, and return its value. Raises DeadlineExceeded: it did not exist in time."""
        value: str = self._ask(timeout_s, "get", key)
        return value

    def look(self, key: str, timeout_s: float) -> str | None:
        """The present value of a key; None if it does not exist."""
        value: str | None = self._ask(timeout_s, "look", key)
        return value

    def below(self, prefix: str, timeout_s: float) -> dict[str, str]:
        """All keys that begin with a prefix, without it, and their values."""
        found: dict[str, str] = self._ask(timeout_s, "below", prefix)
        return found

    def add(self, key: str, number: int, timeout_s: float) -> int:
        """Add to the number that a key has, 0 if it does not exist, and return the sum."""
        total: int = self._ask(timeout_s, "add", key, number)
        return total

    def delete(self, prefix: str, timeout_s: float) -> int:
        """Delete all keys that begin with a prefix, and return how many."""
        count: int = self._ask(timeout_s, "delete", prefix)
        return count

    def ping(self, timeout_s: float) -> None:
        """Check that the store answers."""
        self._ask(timeout_s, "ping")

    def barrier(self, name: str, size: int, timeout_s: float) -> None:
        """Wait for ``size`` clients. Collective over the clients, which call it with this name, once each."""
        if self.add(f"{name}/arrived", 1, timeout_s) == size:
            self.put(f"{name}/all", "1", timeout_s)
        self.get(f"{name}/all", timeout_s)

    def _ask(self, timeout_s: float, *operation: Any) -> Any:
        answers: list[tuple[Any, OSError | None]] = []
        number = self.send(lambda result, error: answers.append((result, error)), *operation)
        end = time.monotonic() + timeout_s
        while not answers:
            left = end - time.monotonic()
            if left <= 0:
                self._then.pop(number, None)
                if operation[0] == "get":
                    self.send(lambda result, error: None, "cancel", number)
                what = " ".join(str(word) for word in operation[:2])
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for the key-value store at {self._place} to answer: {what}"
                )
            poll = select.poll()
            poll.register(self._sock, self.events)
            poll.poll(min(left, _LOOK_S) * 1000)
            self.step()
            if not answers:
                self._check()
        result, error = answers[0]
        if error is not None:
            raise error
        return result

    # The connection

    def _connect(self) -> None:
        failed = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            self._lose(os.strerror(failed))
            return
        try:
            self._sock.getpeername()
        except OSError:  # not yet
            return
        self._is_connected = True

    def _flush(self) -> None:
        try:
            send_ready(self._sock, self._unsent)
        except OSError as error:
            self._lose(str(error))

    def _receive(self) -> None:
        while self.lost is None:
            try:
                received = self._sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(str(error))
                return
            if not received:
                self._lose("it closed the connection")
                return
            self._frames.add(received)
            try:
                for message in self._frames.messages():
                    self._take(message)
            except BadFrame as error:
                self._lose(str(error))

    def _take(self, message: Any) -> None:
        match message:
            case [int(number), result]:
                if (then := self._then.pop(number, None)) is not None:  # None: nobody waits for it any more
                    then(result, None)
            case _:
                raise BadFrame(f"a message that is no answer of a key-value store: {str(message)[:80]}")

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = StoreLost(f"no connection to the key-value store at {self._place}: {why}")
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # closing says nothing where a forked process has it open, too
        except OSError:
            pass
        self._sock.close()
        waiting, self._then = self._then, {}
        for then in waiting.values():
            then(None, self.lost)


_ONLY_HERE = (
    "this is an address of each host's own. If rank 0 is on another host, that found no address of its own to name: "
    "MLFLASH_INTERFACE says which interface to use"
)


def connect(address: tuple[str, int], token: str, end: float, check: Callable[[], None]) -> StoreClient:
    """Connect to a store, which may be just restarting, until ``end`` by time.monotonic.

    ``check`` is called before each attempt, and while calls of the client wait; what it raises ends that. Raises
    StoreLost or DeadlineExceeded: the store is not there, or does not answer.
    """
    pause_s = 0.005
    while True:
        check()
        store = StoreClient(address, token, check)
        try:
            store.ping(left_s(end))
            return store
        except StoreLost as lost:
            store.close()
            if time.monotonic() >= end:
                hint = f"; {_ONLY_HERE}" if address[0].startswith("127.") else ""
                raise StoreLost(f"{lost}{hint}") from lost
        except BaseException:
            store.close()
            raise
        time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
        pause_s = min(2 * pause_s, 0.2)


def left_s(end: float) -> float:
    """Seconds left of a deadline, by time.monotonic."""
    return max(0.0, end - time.monotonic())
