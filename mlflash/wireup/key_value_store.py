"""A small key-value store over TCP, through which processes find each other. This is the server.

It is one object without a thread, driven by its owner: `step` does what there is to do, and `fileno` is readable
whenever there is something. So it fits into any event loop.

Messages are those of `frames`. The first one of a connection is the token, a string of 32 hexadecimal digits. After
anything else the store closes the connection without an answer. Each later message is a list, ``[number, operation,
...]``, with a number that the client chooses. Its answer is ``[number, result]``. Answers come in any order:

| message                    | result                                                               |
|----------------------------|----------------------------------------------------------------------|
| ``[n, "put", key, value]`` | true; an existing value is replaced                                  |
| ``[n, "get", key]``        | the value, as soon as there is one                                   |
| ``[n, "look", key]``       | the value, or null                                                   |
| ``[n, "below", prefix]``   | an object with the keys that begin with the prefix, without it, and  |
|                            | their values                                                         |
| ``[n, "add", key, number]``| the sum, whose text is the new value; a missing key counts as 0      |
| ``[n, "delete", prefix]``  | how many keys began with it; clients that wait for them go on waiting|
| ``[n, "cancel", m]``       | whether message m still waited; it will not be answered              |
| ``[n, "ping"]``            | true                                                                 |

Keys and values are strings, numbers are integers. A connection that sends anything else is closed.
"""

from __future__ import annotations

import bisect
import dataclasses
import hmac
import itertools
import secrets
import selectors
import socket
from collections import deque
from typing import Any

from .frames import BadFrame, Frames, length_of, text_of
from .strangers import MOST, Strangers

_TOKEN_NBYTES = 16
_LARGEST_NBYTES = 1 << 20  # of a message: the nodes of 16,384 ranks, in any order on 2,048 nodes, take 207 kB
_UNSENT_NBYTES = 1 << 26  # of the answers that a connection has not read
_PARTS = 64  # sent at a time; the kernel takes 1,024


@dataclasses.dataclass(eq=False)
class _Connection:
    sock: socket.socket
    frames: Frames
    is_known: bool = False  # it has sent the token
    is_open: bool = True
    unsent: deque[memoryview] = dataclasses.field(default_factory=deque)  # many nodes may share what is in it
    waits: dict[int, str] = dataclasses.field(default_factory=dict)  # message → the key it waits for


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Listen at an address of this machine, IPv4 or IPv6. All ranks may connect at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1 << 14)  # somaxconn of the kernel is the limit


class KeyValueStore:
    """A key-value store that listens. Close it; it may be closed twice.

    A process forked from this one holds the port open, but does not serve it. Each connection takes a
    descriptor. If RLIMIT_NOFILE allows fewer than there are ranks, the last ranks must wait until others disconnect,
    and MPI_Init waits for all.

    Args:
        listener: closed in the end.
        token: 32 hexadecimal digits, which all clients know; None: make one.
        strangers: number of connections that have not sent the token; the oldest is closed for the next.
        stranger_s: how long a connection may take to send the token.
    """

    def __init__(self, listener: socket.socket, token: str | None = None, strangers: int = MOST,
                 stranger_s: float = 10.0):  # fmt: skip
        self.token = token or secrets.token_hex(_TOKEN_NBYTES)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._values: dict[str, str] = {}
        self._keys: list[str] = []  # in order
        self._waiting: dict[str, dict[tuple[_Connection, int], None]] = {}  # in order of arrival
        self._connections: dict[_Connection, None] = {}
        self._answered: dict[_Connection, None] = {}  # in this step
        # Answers in the form in which they are sent, until a key in them changes: all ranks ask for the same ones.
        self._texts: dict[str, bytes] = {}
        self._selector = selectors.EpollSelector()
        self._strangers = Strangers(listener, self._selector, stranger_s, self._drop, strangers)
        self._is_open = True

    def fileno(self) -> int:
        """A descriptor that is readable when `step` has something to do."""
        return self._selector.fileno()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def connections(self) -> int:
        """Number of connections."""
        return len(self._connections)

    def step(self, timeout_s: float | None = 0.0) -> None:
        """Answer the messages that have come.

        Args:
            timeout_s: how long to wait for something, in seconds; None: forever.
        """
        for ready, events in self._selector.select(timeout_s):
            if ready.data is None:
                self._strangers.accept(self._made)
                continue
            connection: _Connection = ready.data
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(connection)
                if connection.is_open and events & selectors.EVENT_READ:
                    self._receive(connection)
            except (OSError, ValueError):
                self._drop(connection)
        self._flush_answered()
        self._strangers.look()

    def put(self, key: str, value: str) -> None:
        """Set the value of a key, without a client."""
        self._put(key, value)
        self._flush_answered()

    def look(self, key: str) -> str | None:
        """The value of a key; None if it has none."""
        return self._values.get(key)

    def below(self, prefix: str) -> dict[str, str]:
        """All keys that begin with a prefix, without it, and their values."""
        return {key[len(prefix) :]: self._values[key] for key in self._keys[self._range(prefix)]}

    def close(self) -> None:
        """Close all connections; waiting clients notice it."""
        if self._is_open:
            self._is_open = False
            for connection in list(self._connections):
                self._drop(connection)
            self._strangers.close()
            self._selector.close()

    # Connections

    def _made(self, sock: socket.socket) -> _Connection:
        if sock.family != socket.AF_UNIX:
            # A node that has lost power sends nothing any more: its connection ends after a minute.
            for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3),
                                  (socket.TCP_NODELAY, 1)):  # fmt: skip
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _Connection(sock, Frames(2 * _TOKEN_NBYTES + 2))
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _drop(self, connection: _Connection) -> None:
        if not connection.is_open:
            return
        connection.is_open = False
        for number in list(connection.waits):
            self._forget(connection, number)
        del self._connections[connection]
        self._selector.unregister(connection.sock)
        try:
            connection.sock.shutdown(socket.SHUT_RDWR)  # closing is not enough if a forked process has it open, too
        except OSError:
            pass
        connection.sock.close()
        self._strangers.closed(connection)

    def _receive(self, connection: _Connection) -> None:
        received = connection.sock.recv(1 << 16)
        if not received:
            self._drop(connection)
            return
        connection.frames.add(received)
        for message in connection.frames.messages():
            if connection.is_known:
                self._answer(connection, message)
            elif isinstance(message, str) and hmac.compare_digest(message.encode(), self.token.encode()):
                connection.is_known = True
                connection.frames.largest_nbytes = _LARGEST_NBYTES
                self._strangers.known(connection)
            else:
                raise BadFrame("no token")
            if not connection.is_open:
                return

    def _send(self, connection: _Connection, number: int, result: object) -> None:
        text = result if isinstance(result, bytes) else text_of(result)
        head = b"[%d," % number
        connection.unsent.extend(map(memoryview, (length_of(len(head) + len(text) + 1) + head, text, b"]")))
        self._answered[connection] = None

    def _flush_answered(self) -> None:
        flushing, self._answered = self._answered, {}
        for connection in flushing:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        if not connection.is_open:
            return
        unsent = connection.unsent
        try:
            while unsent:
                sent = connection.sock.sendmsg(itertools.islice(unsent, _PARTS))
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = unsent[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if sum(map(len, unsent)) > _UNSENT_NBYTES:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    # Messages

    def _answer(self, connection: _Connection, message: Any) -> None:
        match message:
            case [int(number), *operation] if number not in connection.waits:
                result = self._operate(connection, number, operation)
                if number not in connection.waits:
                    self._send(connection, number, result)
            case _:
                raise BadFrame("a message without a number, or with that of one that still waits")

    def _operate(self, connection: _Connection, number: int, operation: list[Any]) -> Any:
        match operation:
            case ["put", str(key), str(value)]:
                self._put(key, value)
                return True
            case ["get", str(key)]:
                return self._values[key] if key in self._values else self._wait(connection, number, key)
            case ["look", str(key)]:
                return self._values.get(key)
            case ["below", str(prefix)]:
                if prefix not in self._texts:
                    self._texts[prefix] = text_of(self.below(prefix))
                return self._texts[prefix]
            case ["add", str(key), int(summand)]:
                total = int(self._values.get(key, "0")) + summand
                self._put(key, str(total))
                return total
            case ["delete", str(prefix)]:
                return self._delete(prefix)
            case ["cancel", int(other)]:
                return self._forget(connection, other)
            case ["ping"]:
                return True
        raise BadFrame(f"an unknown operation of the store: {str(operation)[:80]}")

    def _put(self, key: str, value: str) -> None:
        if key not in self._values:
            bisect.insort(self._keys, key)
        self._values[key] = value
        for prefix in [prefix for prefix in self._texts if key.startswith(prefix)]:
            del self._texts[prefix]
        for connection, number in list(self._waiting.get(key, {})):
            self._forget(connection, number)
            self._send(connection, number, value)

    def _delete(self, prefix: str) -> int:
        found = self._range(prefix)
        self._texts.clear()
        for key in self._keys[found]:
            del self._values[key]
        del self._keys[found]
        return int(found.stop - found.start)

    def _range(self, prefix: str) -> slice:
        """Where the keys are that begin with a prefix."""
        begin = bisect.bisect_left(self._keys, prefix)
        return slice(begin, bisect.bisect_left(self._keys, True, begin, key=lambda key: not key.startswith(prefix)))

    def _wait(self, connection: _Connection, number: int, key: str) -> None:
        connection.waits[number] = key
        self._waiting.setdefault(key, {})[connection, number] = None

    def _forget(self, connection: _Connection, number: int) -> bool:
        key = connection.waits.pop(number, None)
        if key is None:
            return False
        del self._waiting[key][connection, number]
        if not self._waiting[key]:
            del self._waiting[key]
        return True
