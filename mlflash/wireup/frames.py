"""Messages on a stream: the length in four bytes, big endian, then JSON.

The receiver says how large a message may be. Of a longer message nothing is kept: its first four bytes end the
connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

_LENGTH_NBYTES = 4


class BadFrame(ValueError):
    """The bytes received are no message: too long, or no JSON."""


def pack(message: object) -> bytes:
    """The bytes as which a message is sent."""
    text = text_of(message)
    return length_of(len(text)) + text


def text_of(message: object) -> bytes:
    """A message as JSON."""
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def length_of(nbytes: int) -> bytes:
    """The bytes that stand before a message of so many bytes of JSON."""
    return nbytes.to_bytes(_LENGTH_NBYTES, "big")


def send_ready(sock: socket.socket, unsent: bytearray) -> None:
    """Send as much as a socket takes without waiting, and remove it from ``unsent``.

    Raises:
        OSError: the connection is lost.
    """
    try:
        while unsent:
            del unsent[: sock.send(unsent)]
    except BlockingIOError:
        pass


def receive_ready(sock: socket.socket, most_nbytes: int = 1 << 16) -> bytes | None:
    """Receive what has arrived on a socket that does not block; None: nothing, b"": the connection is lost."""
    try:
        return sock.recv(most_nbytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Outbox:
    """Messages on their way into a socket that does not block. ``unsent``: what it has not taken yet."""

    def __init__(self, sock: socket.socket):
        self._sock, self.unsent = sock, bytearray()

    def send(self, message: object) -> None:
        """Send a message. Keep what the socket does not take. If the connection is lost, the reader notices."""
        self.unsent += pack(message)
        self.send_rest()

    def send_rest(self) -> None:
        """Send more of what was kept."""
        with contextlib.suppress(OSError):
            send_ready(self._sock, self.unsent)


class Frames:
    """The messages in the bytes of one stream, as they arrive.

    Args:
        largest_nbytes: of one message; may be changed between two of them.
    """

    def __init__(self, largest_nbytes: int):
        self.largest_nbytes = largest_nbytes
        self._received = bytearray()

    def add(self, received: bytes) -> None:
        """Append what has arrived."""
        self._received += received

    def messages(self) -> Iterator[Any]:
        """Yield the messages that are complete, one after the other.

        Raises:
            BadFrame: the rest of the stream cannot be read.
        """
        while len(self._received) >= _LENGTH_NBYTES:
            nbytes = int.from_bytes(self._received[:_LENGTH_NBYTES], "big")
            if nbytes > self.largest_nbytes:
                raise BadFrame(f"a message of {nbytes} bytes, where {self.largest_nbytes} are allowed")
            end = _LENGTH_NBYTES + nbytes
            if len(self._received) < end:
                return
            text = bytes(self._received[_LENGTH_NBYTES:end])
            del self._received[:end]
            try:
                message = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise BadFrame(f"bytes that are no JSON: {text[:80]!r}") from error
            yield message
