"""A small key-value store over TCP, through which processes find each other. This is the server.

It is one object without a thread, driven by its owner: `step` does what there is to do, and `fileno` is readable
whenever there is something. So it fits into any event loop.

Messages are those of `frames`. The first one of a connection is the token, a string of 32 hexadecimal digits. After
anything else the store closes the connection without an answer. Each later message is a list, ``[number, operation,
...]``, with a number that the client chooses. Its answer is ``[number, result]``, or ``[number, null, text]`` if it was
refused. Answers come in any order:

| message                    | result                                                               |
|----------------------------|----------------------------------------------------------------------|
| ``[n, "put", key, value]`` | true; an existing value is replaced                                  |
| ``[n, "get", key]``        | the value, as soon as there is one                                   |
| ``[n, "look", key]``       | the value, or null                                                   |
| ``[n, "below", prefix,     | ``[page, last]``. The page is an object with the keys that begin     |
|  after]``                  | with the prefix, without it, in order, after ``after`` (or null),    |
|                            | and their values. If the page is full, ``last`` is its last key, and |
|                            | the next page begins after it; otherwise null                        |
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
from typing import Any

from .frames import BadFrame, Frames, pack, packed_text, text_of
from .store_limits import Limits
from .strangers import Strangers

_LARGEST_NUMBER = 2**53
_TOKEN_NBYTES = 16
_PREFIXES = 8  # prefixes whose pages are kept


class _Refused(Exception):
    """A message that is well formed, but cannot be fulfilled."""


@dataclasses.dataclass(eq=False)
class _Connection:
    sock: socket.socket
    frames: Frames
    is_known: bool = False  # it has sent the token
    is_open: bool = True
    unsent: bytearray = dataclasses.field(default_factory=bytearray)
    waits: dict[int, str] = dataclasses.field(default_factory=dict)  # message → the key it waits for


class KeyValueStore:
    """A key-value store that listens. Close it; it may be closed twice.

    A process forked from this one holds the port open, but does not serve it. Each connection takes a
    descriptor. If RLIMIT_NOFILE allows fewer than there are ranks, the last ranks must wait until others disconnect,
    and MPI_Init waits for all.

    Args:
        host: the one address to listen on, IPv4 or IPv6.
        port: 0 for any.
        token: 32 hexadecimal digits, which all clients know; None: make one.
        limits: how much it holds at most.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str | None = None, limits: Limits | None = None):
        self.token = token or secrets.token_hex(_TOKEN_NBYTES)
        self.limits = limits or Limits()
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1 << 14)  # all ranks come at once; somaxconn of the kernel is the limit
        except OSError:
            listener.close()
            raise
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._values: dict[str, str] = {}
        self._keys: list[str] = []  # in order
        self._nbytes = 0
        self._waiting: dict[str, dict[tuple[_Connection, int], None]] = {}  # in order of arrival
        self._connections: dict[_Connection, None] = {}
        self._answered: dict[_Connection, None] = {}  # in this step
        # Answers in the form in which they are sent, until a key in them changes: all ranks ask for the same ones.
        self._pages: dict[str, dict[str | None, bytes]] = {}
        self._selector = selectors.EpollSelector()
        limits = self.limits
        self._strangers = Strangers(listener, self._selector, limits.stranger_s, self._drop, limits.strangers)
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
            except (OSError, BadFrame):
                self._drop(connection)
        self._flush_answered()
        self._strangers.look()

    def put(self, key: str, value: str) -> bool:
        """Set the value of a key, without a client.

        Returns:
            False: the store is full.
        """
        try:
            self._put(key, value)
        except _Refused:
            return False
        self._flush_answered()
        return True

    def delete(self, prefix: str) -> None:
        """Delete all keys that begin with a prefix."""
        self._delete(prefix)

    def look(self, key: str) -> str | None:
        """The value of a key; None if it has none."""
        return self._values.get(key)

    def awaits(self, key: str) -> bool:
        """Whether a client waits for a key."""
        return key in self._waiting

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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A node that has lost power sends nothing any more: its connection ends after a minute.
        for option, seconds in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
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
            elif isinstance(message, str) and hmac.compare_digest(message.encode(errors="replace"), self._secret):
                connection.is_known = True
                connection.frames.largest_nbytes = self.limits.message_nbytes
                self._strangers.known(connection)
            else:
                raise BadFrame("no token")
            if not connection.is_open:
                return

    @property
    def _secret(self) -> bytes:
        return self.token.encode()

    def _send(self, connection: _Connection, *message: Any) -> None:
        self._send_packed(connection, pack(message))

    def _send_packed(self, connection: _Connection, packed: bytes) -> None:
        connection.unsent += packed
        self._answered[connection] = None
        if len(connection.unsent) > self.limits.unsent_nbytes:
            self._flush(connection)

    def _flush_answered(self) -> None:
        flushing, self._answered = self._answered, {}
        for connection in flushing:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        if not connection.is_open:
            return
        try:
            del connection.unsent[: connection.sock.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if len(connection.unsent) > self.limits.unsent_nbytes:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    # Messages

    def _answer(self, connection: _Connection, message: Any) -> None:
        if not (isinstance(message, list) and message and _is_number(message[0])):
            raise BadFrame("a message without a number")
        number, *operation = message
        if number in connection.waits:
            raise BadFrame(f"two messages {number} at a time")
        try:
            result = self._operate(connection, number, operation)
        except _Refused as refused:
            self._send(connection, number, None, str(refused))
        else:
            if isinstance(result, bytes):
                self._send_packed(connection, packed_text(b"[%d,%s]" % (number, result)))
            elif number not in connection.waits:
                self._send(connection, number, result)

    def _operate(self, connection: _Connection, number: int, operation: list[Any]) -> Any:
        match operation:
            case ["put", str(key), str(value)]:
                self._put(key, value)
                return True
            case ["get", str(key)]:
                if key in self._values:
                    return self._values[key]
                return self._wait(connection, number, key)
            case ["look", str(key)]:
                return self._values.get(key)
            case ["below", str(prefix), str() | None as after] if prefix:
                return self._page(prefix, after)
            case ["add", str(key), summand] if _is_number(summand):
                return self._add(key, summand)
            case ["delete", str(prefix)] if prefix:
                return self._delete(prefix)
            case ["cancel", other] if _is_number(other):
                return self._forget(connection, other)
            case ["ping"]:
                return True
        raise BadFrame(f"an unknown operation of the store: {str(operation)[:80]}")

    def _put(self, key: str, value: str) -> None:
        self._check(key)
        before = self._values.get(key)
        nbytes = self._nbytes + len(value) + (len(key) if before is None else -len(before))
        if nbytes > self.limits.nbytes or (before is None and len(self._values) >= self.limits.keys):
            raise _Refused(f"the store is full: {len(self._values)} keys, {self._nbytes} bytes")
        if before is None:
            bisect.insort(self._keys, key)
        self._values[key], self._nbytes = value, nbytes
        for prefix in [prefix for prefix in self._pages if key.startswith(prefix)]:
            del self._pages[prefix]
        for connection, number in list(self._waiting.get(key, {})):
            self._forget(connection, number)
            self._send(connection, number, value)

    def _check(self, key: str) -> None:
        if not 0 < len(key) <= self.limits.key_length:
            raise _Refused(f"a key has 1 to {self.limits.key_length} characters, this one {len(key)}")

    def _add(self, key: str, summand: int) -> int:
        try:
            total = int(self._values.get(key, "0")) + summand
        except ValueError:
            raise _Refused(f"{key} is no number") from None
        if not _is_number(total):
            raise _Refused(f"{key} would be larger than 2**53")
        self._put(key, str(total))
        return total

    def _delete(self, prefix: str) -> int:
        begin, end = self._below(prefix)
        self._pages.clear()
        for key in self._keys[begin:end]:
            self._nbytes -= len(key) + len(self._values.pop(key))
        del self._keys[begin:end]
        return end - begin

    def _below(self, prefix: str) -> tuple[int, int]:
        """The range of the sorted keys that begin with a prefix."""
        begin = bisect.bisect_left(self._keys, prefix)
        return begin, bisect.bisect_left(self._keys, True, begin, key=lambda key: not key.startswith(prefix))

    def _page(self, prefix: str, after: str | None) -> bytes:
        """A page in the form in which it is sent. It is made once, for all that ask for it."""
        if prefix not in self._pages and len(self._pages) >= _PREFIXES:
            del self._pages[next(iter(self._pages))]
        pages = self._pages.setdefault(prefix, {})
        if after not in pages:
            (begin, end), page, nbytes = self._below(prefix), dict[str, str](), 0
            if after is not None:
                begin = bisect.bisect_right(self._keys, prefix + after, begin, end)
            for key in itertools.islice(self._keys, begin, end):
                if page and nbytes > self.limits.page_nbytes:
                    break
                rest = key[len(prefix) :]
                page[rest] = self._values[key]
                nbytes += len(rest) + len(page[rest])
            last = next(reversed(page)) if begin + len(page) < end else None
            pages[after] = text_of([page, last])
        return pages[after]

    def _wait(self, connection: _Connection, number: int, key: str) -> None:
        self._check(key)
        if len(connection.waits) >= self.limits.waits:
            raise _Refused(f"{self.limits.waits} messages of this connection wait already")
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


def _is_number(number: object) -> bool:
    return type(number) is int and -_LARGEST_NUMBER < number < _LARGEST_NUMBER
