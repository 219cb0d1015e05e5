"""What a key-value store holds at most, and takes from those who connect to it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one store holds at most, so that nobody who can reach its port can hurt it.

    Attributes:
        strangers: connections that have not sent the token; the oldest is closed for the next.
        stranger_s: how long such a connection may take, seconds.
        message_nbytes: of a message, after the token; 16,384 ranks in any order on 2,048 nodes are described by 207 kB.
        key_length: characters of a key.
        keys: how many.
        nbytes: characters of all keys and values.
        waits: messages of one connection that wait.
        unsent_nbytes: answers of one connection that it has not taken.
        page_nbytes: characters of keys and values of a page of what is below a prefix, but for the last of them.
    """

    strangers: int = 64
    stranger_s: float = 10.0
    message_nbytes: int = 1 << 20
    key_length: int = 512
    keys: int = 1_000_000
    nbytes: int = 1 << 28
    waits: int = 1024
    unsent_nbytes: int = 1 << 23
    page_nbytes: int = 1 << 17
