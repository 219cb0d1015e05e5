"""Which node this process is on: its host, and the memory file system that it shares with other ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple


class Node(NamedTuple):
    """What the ranks of a node have in common. Ranks with the same host and memory are on one node.

    Attributes:
        host: a name of this host since its last boot.
        memory: identity of a memory directory on this host; "" if it does not exist.
        name: of the node, in messages.
    """

    host: str
    memory: str
    name: str


def this_node(memory: str = "/dev/shm", name: str = "") -> Node:
    """Return the node of this process.

    Containers of one host may have its name and its network, and a ``/dev/shm`` each (``docker run --network host``).
    The kernel numbers each file system of memory.

    Args:
        memory: the directory that ranks of this node share.
        name: of the node; "": that of the host.
    """
    found = os.stat(memory) if os.path.isdir(memory) else None
    return Node(name_of_host(), f"{found.st_dev}:{found.st_ino}" if found else "", name or socket.gethostname())


def name_of_host() -> str:
    """A name of this host since its last boot."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
