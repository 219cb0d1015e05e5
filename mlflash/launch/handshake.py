"""How two processes that know a token meet at a port, and prove to each other that they know it, without sending it.

Another user of a host may listen at a port that is known. Three messages do that:

1. ``{"nonce"}``, to the port;
2. ``{"nonce", "proof"}``, from the port: an HMAC, by the token, of both nonces;
3. ``{"proof", ...}``, to the port: another HMAC of the same, and what the process has to say first.

Both cover the address and the port, so that nobody who listens elsewhere can pass them on. A connection that has proved
nothing is a stranger. A port has only so many of them at a time, each only for so long (`Strangers`), because whoever
reaches a port can connect to it a thousand times and say nothing.

Source: multiprocessing.connection of Python, which has such challenges, for threads.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from typing import Any, Protocol

from .lines import Connection

STRANGERS = 64
"""Number of strangers that a listener has at a time, if its owner says nothing else."""
STRANGER_S = 10.0
"""How long each of them may stay one."""
_STRANGER_NBYTES = 1 << 12  # of the first message
_NONCE_NBYTES = 16


def proof(token: str, side: str, place: str, process_nonce: str, port_nonce: str) -> str:
    """What shows that one ``side`` of a connection, "port" or "process", knows the token.

    Args:
        place: address and port, see `Connection.place`.
        process_nonce, port_nonce: what the process and the port have sent.
    """
    text = "\0".join((side, place, process_nonce, port_nonce))
    return hmac.new(token.encode(), text.encode(errors="surrogatepass"), "sha256").hexdigest()


def _is_proof(given: object, token: str, side: str, place: str, process_nonce: str, port_nonce: str) -> bool:
    expected = proof(token, side, place, process_nonce, port_nonce)
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)


async def introduce(connection: Connection, token: str, **hello: Any) -> None:
    """Say ``hello`` to a port, once both ends have proved that they know its token. Then ``heard`` hears.

    Raises ConnectionError: whoever listens there does not know it, or the connection has ended. `lost` is not
    called then.
    """
    answers: asyncio.Queue[Any] = asyncio.Queue()
    lines, heard, lost = connection.lines, connection.heard, connection.lost
    nonce, largest_nbytes = secrets.token_hex(_NONCE_NBYTES), lines.largest_nbytes
    connection.heard, connection.lost, lines.largest_nbytes = answers.put_nowait, answers.put_nowait, _STRANGER_NBYTES
    try:
        place = connection.place("peername")
        connection.send({"nonce": nonce})
        match await answers.get():
            case {"nonce": str(other), "proof": str(given)} if _is_proof(given, token, "port", place, nonce, other):
                connection.heard, connection.lost, lines.largest_nbytes = heard, lost, largest_nbytes
                connection.send({"proof": proof(token, "process", place, nonce, other), **hello})
            case _:
                connection.close("it does not know the token" if connection.is_open else connection.why)
    except BaseException:
        connection.close()
        raise
    if not connection.is_open:
        raise ConnectionRefusedError(connection.why)


class Stranger(Protocol):
    """A connection whose other end has not said who it is."""

    def close(self) -> None:
        """End the connection."""


class Strangers:
    """The strangers of a listener: so many at a time, each only for so long. The oldest is closed for the next."""

    def __init__(self, most: int = STRANGERS, patience_s: float = STRANGER_S):
        self._most, self._patience_s = most, patience_s
        self._timers: dict[Stranger, asyncio.TimerHandle] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, stranger: Stranger) -> None:
        while len(self._timers) >= self._most:
            oldest = next(iter(self._timers))
            self.forget(oldest)
            oldest.close()
        self._timers[stranger] = asyncio.get_running_loop().call_later(self._patience_s, stranger.close)

    def forget(self, stranger: Stranger) -> None:
        """Forget a connection that is no stranger any more, or has ended."""
        if (timer := self._timers.pop(stranger, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        for stranger in list(self._timers):
            stranger.close()


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
                 strangers: int = STRANGERS, stranger_s: float = STRANGER_S):  # fmt: skip
        self._token, self._known, self._largest_nbytes = token, known, largest_nbytes
        self._most, self._strangers = strangers, Strangers(strangers, stranger_s)
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
        if self._server is not None:
            self._server.close()
        self._strangers.close()

    def _accept(self) -> Connection:
        stranger = Connection(lambda message: self._challenge(stranger, message),
                              lambda why: self._strangers.forget(stranger), _STRANGER_NBYTES)  # fmt: skip
        self._strangers.add(stranger)
        return stranger

    def _challenge(self, stranger: Connection, hello: Any) -> None:
        match hello:
            case {"nonce": str(nonce)}:
                own, place = secrets.token_hex(_NONCE_NBYTES), stranger.place("sockname")
                stranger.heard = lambda message: self._meet(stranger, message, place, nonce, own)
                stranger.send({"nonce": own, "proof": proof(self._token, "port", place, nonce, own)})
            case _:
                raise ValueError("no nonce")

    def _meet(self, stranger: Connection, hello: Any, place: str, nonce: str, own: str) -> None:
        given = hello["proof"] if isinstance(hello, dict) else ""
        if not _is_proof(given, self._token, "process", place, nonce, own):
            raise ValueError("it does not know the token")
        self._strangers.forget(stranger)
        stranger.lines.largest_nbytes = self._largest_nbytes
        self._known(stranger, hello)
