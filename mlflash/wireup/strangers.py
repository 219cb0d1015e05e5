"""The new connections of a port, which have not said yet who they are: only so many at a time, each only for so long.

Whoever reaches a port can connect to it a thousand times and say nothing. Without limits, such connections take the
descriptors that the ranks need, and an accept that fails ends the service, or keeps it from ever sleeping.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")

MOST = 64
"""Number of strangers that a port has at a time, if its service says nothing else."""
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 1.0  # until a port listens again whose accept failed for lack of descriptors


class Strangers(Generic[C]):
    """The port of a service, and its connections that have not said who they are. Close it.

    Args:
        listener: closed in the end.
        selector: of the service. It has the listener, with no data.
        longest_s: how long a connection may be a stranger.
        drop: closes a connection of the service, which then calls `closed`.
        most: number of strangers. The oldest is closed for the next.
    """

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, longest_s: float,
                 drop: Callable[[C], None], most: int = MOST):  # fmt: skip
        self._listener, self._selector, self._drop = listener, selector, drop
        self._longest_s, self._most = longest_s, most
        self._since: dict[C, float] = {}  # oldest first
        self._listens_at = 0.0
        self._is_listening = False
        listener.setblocking(False)
        self._listen()

    def __len__(self) -> int:
        return len(self._since)

    def accept(self, make: Callable[[socket.socket], C]) -> C | None:
        """Accept a connection; ``make`` makes what the service calls a connection of a socket, which does not block.

        Returns None: it has already gone, or there is no descriptor for it. Then the oldest stranger gives its own.
        """
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_MORE:
                self._pause()
                self._drop_oldest()
            return None
        sock.setblocking(False)
        try:
            connection = make(sock)
        except OSError:  # it has gone meanwhile
            sock.close()
            return None
        self._since[connection] = time.monotonic()
        if len(self._since) > self._most:
            self._drop_oldest()
        return connection

    def known(self, connection: C) -> None:
        """Take a connection for none of a stranger any more."""
        self._since.pop(connection, None)

    def closed(self, connection: C) -> None:
        """Note that a connection is closed: its descriptor is free."""
        self._since.pop(connection, None)
        self._listen()

    def look(self) -> None:
        """Close those that have been strangers for too long, and listen again after a pause."""
        now = time.monotonic()
        for connection in [one for one, since in self._since.items() if now - since > self._longest_s]:
            self._drop(connection)
        if now >= self._listens_at:
            self._listen()

    def close(self) -> None:
        """Close the port, not its connections."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def _drop_oldest(self) -> None:
        if self._since:
            self._drop(next(iter(self._since)))

    def _listen(self) -> None:
        if not self._is_listening and self._listener.fileno() >= 0:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._is_listening = True

    def _pause(self) -> None:
        self._selector.unregister(self._listener)
        self._is_listening, self._listens_at = False, time.monotonic() + _PAUSE_S
