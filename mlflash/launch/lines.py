"""Lines of JSON between two processes: how they are written and read, and a port for them, in asyncio.

A port is for processes that know its token, and each of the two ends proves to the other that it does, without sending
it: another user of a host may listen at a port that is known. Three messages do that:

1. ``{"nonce"}``, to the port;
2. ``{"nonce", "proof"}``, from the port: an HMAC, by the token, of both nonces;
3. ``{"proof", ...}``, to the port: another HMAC of the same, and what the process has to say first.

Both cover the number of the port, so that nobody who listens at another one can pass them on. A connection that has
proved nothing is a stranger. A port has only so many of them at a time, each only for so long, because whoever reaches
a port can connect to it a thousand times and say nothing.

Source: multiprocessing.connection of Python, which has such challenges, for threads.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

STRANGERS = 64
"""Number of strangers that a port has at a time, if its owner says nothing else."""
_STRANGER_NBYTES = 1 << 12  # of the first message
_NONCE_NBYTES = 16
_UNSENT_NBYTES = 1 << 26  # of what a connection has not read
_PART_NBYTES = 1 << 14  # given to a transport at a time, and kept by it


class BadLine(ValueError):
    """The bytes received are no message: too long, or no JSON."""


def pack(message: object) -> bytes:
    """The bytes as which a message is sent."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def proof(token: str, side: str, port: int, mine: str, theirs: str) -> str:
    """What shows that one ``side`` of a connection, "port" or "process", knows the token.

    Args:
        port: its number.
        mine, theirs: the nonces of the process and of the port.
    """
    said = "\0".join((side, str(port), mine, theirs))
    return hmac.new(token.encode(), said.encode(), "sha256").hexdigest()


def _is_proof(given: object, token: str, side: str, port: int, mine: str, theirs: str) -> bool:
    expected = proof(token, side, port, mine, theirs)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


class Lines:
    """The messages in the bytes of one stream, as they arrive.

    Args:
        largest_nbytes: of one message; may be changed between two of them.
    """

    def __init__(self, largest_nbytes: int):
        self.largest_nbytes = largest_nbytes
        self._begun = bytearray()

    def add(self, received: bytes) -> Iterator[Any]:
        """Yield the messages that are complete with these bytes.

        Raises:
            BadLine: the rest of the stream cannot be read.
        """
        first, *others = received.split(b"\n")
        self._begun += first
        for rest in others:
            line, self._begun = self._begun, bytearray(rest)
            self._check(line)
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadLine(f"bytes that are no JSON: {bytes(line[:80])!r}") from error
            yield message
        self._check(self._begun)

    def _check(self, line: bytearray) -> None:
        if len(line) > self.largest_nbytes:
            raise BadLine(f"a message of more than {self.largest_nbytes} bytes")


class Connection(asyncio.Protocol):
    """One end of a connection, in an event loop.

    Attributes:
        heard: called with each message. An exception of the kinds that a senseless message causes (KeyError, TypeError,
            ValueError) ends the connection.
        lost: called once, with the reason, when the connection has ended.
    """

    def __init__(self, heard: Callable[[Any], None], lost: Callable[[str], None], largest_nbytes: int):
        self.heard, self.lost, self.lines = heard, lost, Lines(largest_nbytes)
        self._transport: asyncio.Transport | None = None
        self._why = "the other end closed it"
        self._unsent: deque[memoryview] = deque()  # many connections may share what is in it
        self._is_writable, self._is_ending = True, False
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_PART_NBYTES)
        if not self.is_open and not self._is_ending:  # it was closed before
            self._transport.abort()
            return
        sock: socket.socket = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            # A node that has lost power sends nothing any more: its connection ends after a minute.
            for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3),
                                  (socket.TCP_NODELAY, 1)):  # fmt: skip
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._send()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            for message in self.lines.add(data):
                if not self.is_open:
                    return
                self.heard(message)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self.close(f"it sent something senseless: {error!r:.200}")

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_open = False
        self.lost(str(error) if error is not None else self._why)

    def send(self, message: object) -> None:
        """Send a message, without waiting. If the connection is lost, `lost` tells, and not this call."""
        self.send_packed(pack(message))

    def send_packed(self, line: bytes) -> None:
        """Send bytes of `pack`, which may go to many connections."""
        if self.is_open:
            self._unsent.append(memoryview(line))
            self._send()
            if sum(map(len, self._unsent)) > _UNSENT_NBYTES:
                self.close("it does not read what it is sent")

    def _send(self) -> None:
        """Give the transport, which copies it, only as much as it can send soon."""
        while self._unsent and self._is_writable and self._transport is not None:
            part = self._unsent[0][:_PART_NBYTES]
            self._unsent[0] = self._unsent[0][_PART_NBYTES:]
            if not self._unsent[0]:
                self._unsent.popleft()
            self._transport.write(part)
        if not self._unsent and self._is_ending and self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._is_writable = False

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._is_writable = True
        self._send()

    async def introduce(self, token: str, **hello: Any) -> None:
        """Say ``hello`` to a port, once both ends have proved that they know its token. Then `heard` hears.

        Raises ConnectionError: whoever listens there does not know it, or the connection has ended. `lost` is not
        called then.
        """
        assert self._transport is not None
        answers: asyncio.Queue[Any] = asyncio.Queue()
        heard, lost, largest_nbytes = self.heard, self.lost, self.lines.largest_nbytes
        mine, port = secrets.token_hex(_NONCE_NBYTES), self._transport.get_extra_info("peername")[1]
        self.heard, self.lost, self.lines.largest_nbytes = answers.put_nowait, answers.put_nowait, _STRANGER_NBYTES
        self.send({"nonce": mine})
        try:
            match await answers.get():
                case {"nonce": str(theirs), "proof": str(given)} if _is_proof(given, token, "port", port, mine, theirs):
                    self.heard, self.lost, self.lines.largest_nbytes = heard, lost, largest_nbytes
                    self.send({"proof": proof(token, "process", port, mine, theirs), **hello})
                case _:
                    self.close("it does not know the token" if self.is_open else self._why)
        except BaseException:
            self.close()
            raise
        if not self.is_open:
            raise ConnectionRefusedError(self._why)

    def close(self, why: str = "it was closed here") -> None:
        """End the connection at once, without what was not sent yet."""
        self._why, self.is_open = why, False
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """End the connection when everything is sent. Nothing is heard any more."""
        self._why, self.is_open, self._is_ending = "it was closed here", False, True
        self._send()


class Port:
    """A port for processes that know a token. `close` it.

    Args:
        token: a connection that does not prove to know it is closed.
        known: called with a connection that has, and with the message that proved it. It sets ``heard`` and ``lost``.
        largest_nbytes: of a message.
        strangers, stranger_s: how many connections may have proved nothing, and for how long each. The oldest is closed
            for the next.
    """

    def __init__(self, token: str, known: Callable[[Connection, dict[str, Any]], None], largest_nbytes: int,
                 strangers: int = STRANGERS, stranger_s: float = 10.0):  # fmt: skip
        self._token, self._known, self._largest_nbytes = token, known, largest_nbytes
        self._most, self._stranger_s = strangers, stranger_s
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}  # oldest first
        self._server: asyncio.Server | None = None
        self.address: tuple[str, int] = ("", 0)

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections, from now on. The socket is closed in the end."""
        self.address = listener.getsockname()[:2]
        loop = asyncio.get_running_loop()
        # asyncio accepts so many at once, before it calls `_accept`.
        self._server = await loop.create_server(self._accept, sock=listener, backlog=self._most)
        listener.listen(1 << 14)

    def close(self) -> None:
        """Accept no more connections, and close the strangers."""
        if self._server is not None:
            self._server.close()
        for stranger in list(self._strangers):
            stranger.close()

    def _accept(self) -> Connection:
        stranger = Connection(lambda message: self._challenge(stranger, message), lambda why: self._forget(stranger),
                              _STRANGER_NBYTES)  # fmt: skip
        while len(self._strangers) >= self._most:
            oldest = next(iter(self._strangers))
            self._forget(oldest)
            oldest.close()
        loop = asyncio.get_running_loop()
        self._strangers[stranger] = loop.call_later(self._stranger_s, stranger.close)
        return stranger

    def _challenge(self, stranger: Connection, hello: Any) -> None:
        match hello:
            case {"nonce": str(its)}:
                mine, port = secrets.token_hex(_NONCE_NBYTES), self.address[1]
                stranger.heard = lambda message: self._meet(stranger, message, its, mine)
                stranger.send({"nonce": mine, "proof": proof(self._token, "port", port, its, mine)})
            case _:
                raise ValueError("no nonce")

    def _meet(self, stranger: Connection, hello: Any, its: str, mine: str) -> None:
        given = hello["proof"] if isinstance(hello, dict) else ""
        if not _is_proof(given, self._token, "process", self.address[1], its, mine):
            raise ValueError("it does not know the token")
        self._forget(stranger)
        stranger.lines.largest_nbytes = self._largest_nbytes
        self._known(stranger, hello)

    def _forget(self, stranger: Connection) -> None:
        if (timer := self._strangers.pop(stranger, None)) is not None:
            timer.cancel()


def listener_at(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Listen at an address of this machine, IPv4 or IPv6; "": at all of them. All nodes may connect at once.

    Raises OSError: the port is taken.
    """
    backlog = 1 << 14  # somaxconn of the kernel is the limit
    if not host:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=backlog)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
