"""The two sides of an introduction by a token (`mlflash.launch.handshake`), for plain sockets."""

from __future__ import annotations

import json
import socket
from typing import Any

from mlflash.launch.handshake import proof
from mlflash.launch.lines import pack


def introduce(sock: socket.socket, token: str, **hello: Any) -> None:
    """Say ``hello`` to the port at the other end."""
    sock.sendall(pack({"nonce": "mine"}))
    nonce = json.loads(_line(sock))["nonce"]
    sock.sendall(pack({"proof": proof(token, "process", _place(sock.getpeername()), "mine", nonce), **hello}))


def meet(sock: socket.socket, token: str) -> Any:
    """Be the port, and return what the process at the other end says."""
    nonce, place = json.loads(_line(sock))["nonce"], _place(sock.getsockname())
    sock.sendall(pack({"nonce": "theirs", "proof": proof(token, "port", place, nonce, "theirs")}))
    hello = json.loads(_line(sock))
    assert hello.pop("proof") == proof(token, "process", place, nonce, "theirs")
    return hello


def _place(name: Any) -> str:
    return f"{name[0]} {name[1]}"


def _line(sock: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):  # and not a byte more
        received = sock.recv(1)
        assert received, "the other end closed it"
        line += received
    return line
