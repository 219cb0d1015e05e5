"""How much a key-value store holds at most, and accepts from those who connect to it."""

from __future__ import annotations

import dataclasses

from .strangers import MOST


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much one store holds at most, so that nobody who can reach its port can harm it.

    Attributes:
        strangers: number of connections that have not sent the token; the oldest is closed for the next.
        stranger_s: how long a connection may take to send the token, in seconds.
        message_nbytes: size of a message after the token. The nodes of 16,384 ranks, in any order on 2,048 nodes, take
            207 kB.
        key_length: characters of a key.
        keys: number of keys.
        nbytes: characters of all keys and values.
        waits: number of messages of one connection that wait.
        unsent_nbytes: size of the answers that one connection has not read.
        page_nbytes: characters of the keys and values of a page, not counting its last key.
    """

    strangers: int = MOST
    stranger_s: float = 10.0
    message_nbytes: int = 1 << 20
    key_length: int = 512
    keys: int = 1_000_000
    nbytes: int = 1 << 28
    waits: int = 1024
    unsent_nbytes: int = 1 << 23
    page_nbytes: int = 1 << 17
