"""Lines of JSON between two processes: how they are written and read, in asyncio."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

_UNSENT_NBYTES = 1 << 26  # of what a connection has not read
_PART_NBYTES = 1 << 14  # given to a transport at a time, and kept by it


class BadLine(ValueError):
    """The bytes received are no message: too long, or no JSON."""


def pack(message: object) -> bytes:
    """The bytes as which a message is sent."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


class Lines:
    """The messages in the bytes of one stream, as they arrive.

    Args:
        largest_nbytes: of one message; may be changed between two of them.
    """

    def __init__(self, largest_nbytes: int):
        self.largest_nbytes = largest_nbytes
        self._partial = bytearray()

    def add(self, received: bytes) -> Iterator[Any]:
        """Yield the messages that are complete with these bytes.

        Raises:
            BadLine: the rest of the stream cannot be read.
        """
        first, *others = received.split(b"\n")
        self._partial += first
        for rest in others:
            line, self._partial = self._partial, bytearray(rest)
            self._check(line)
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadLine(f"bytes that are no JSON: {bytes(line[:80])!r}") from error
            yield message
        self._check(self._partial)

    def _check(self, line: bytearray) -> None:
        if len(line) > self.largest_nbytes:
            raise BadLine(f"a message of more than {self.largest_nbytes} bytes")


class Connection(asyncio.Protocol):
    """One end of a connection, in an event loop.

    Attributes:
        heard: called with each message. An exception of the kinds that a senseless message causes (KeyError, TypeError,
            ValueError) ends the connection.
        lost: called once, with the reason, when the connection has ended.
        why: the reason for which it ended or will end.
    """

    def __init__(self, heard: Callable[[Any], None], lost: Callable[[str], None], largest_nbytes: int):
        self.heard, self.lost, self.lines = heard, lost, Lines(largest_nbytes)
        self._transport: asyncio.Transport | None = None
        self.why = "the other end closed it"
        self._unsent: deque[memoryview] = deque()  # many connections may share what is in it
        self._is_writable, self._is_ending = True, False
        self.is_open = True

    def place(self, end: str) -> str:
        """The address and the port of one end ("peername", "sockname") over TCP, once the connection is made.

        Both ends see the same text. Raises ConnectionResetError: it has ended already.
        """
        assert self._transport is not None
        name = self._transport.get_extra_info(end)
        if name is None:
            raise ConnectionResetError("it was closed at once")
        return f"{name[0].removeprefix('::ffff:').partition('%')[0]} {name[1]}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
        try:
            for message in self.lines.add(data):
                if not self.is_open:
                    return
                self.heard(message)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self.close(f"it sent something senseless: {error!r:.200}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self.lost(str(error) if error is not None else self.why)

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
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._send()

    def close(self, why: str = "it was closed here") -> None:
        """End the connection at once, without what was not sent yet."""
        self.why, self.is_open = why, False
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """End the connection when everything is sent. Nothing is heard any more."""
        self.why, self.is_open, self._is_ending = "it was closed here", False, True
        self._send()


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
