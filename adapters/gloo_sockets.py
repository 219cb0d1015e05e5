"""The connections of a gloo group, which are shut down here: gloo itself has no way to end what waits for a lost host.

A killed process closes its connections, and gloo raises. A host that is cut off says nothing, and gloo waits for its
timeout, which training has long. Which connections of this process are a group's follows from where it listens, and
where the other ranks do: they tell each other through their store.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import ProcessGroupGloo, Store

Address = tuple[str, int]
_COMPUTES = "pt_gloo_runloop"  # what torch calls these threads
_MEETS = timedelta(seconds=10)  # for all ranks to connect: one may be lost meanwhile, and gloo cannot be told so


def connect(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[ProcessGroupGloo, set[Address]]:
    """Make a group of gloo. Collective over it.

    Args:
        store: of the group alone.
        rank: of this process in it.
        size: how many ranks it has.
        timeout: of its calls.

    Returns:
        The group, and where its ranks listen: what `shut_down` takes.
    """
    before = _listening()
    group = ProcessGroupGloo(store, rank, size, min(timeout, _MEETS))
    group._set_default_timeout(timeout)
    store.set(f"listens/{rank}", json.dumps(sorted(_listening() - before)))
    told = store.multi_get([f"listens/{one}" for one in range(size)])
    return group, {(host, port) for one in told for host, port in json.loads(one)}


def shut_down(listeners: Collection[Address]) -> None:
    """End all connections of this process to who listens there, and from them. Not collective; any thread."""
    for one in _sockets():
        try:
            if _address(one.getpeername()) in listeners or _address(one.getsockname()) in listeners:
                one.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is not connected
            continue


def threads_sleep() -> bool:
    """Whether all threads of gloo that compute wait for something. Not collective."""
    for thread in os.listdir("/proc/self/task"):
        try:
            text = Path(f"/proc/self/task/{thread}/stat").read_text()
        except OSError:  # it has ended
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name == _COMPUTES and rest.split()[0] != "S":
            return False
    return True


def _listening() -> set[Address]:
    return {
        _address(one.getsockname()) for one in _sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _sockets() -> Iterator[socket.socket]:
    """All TCP sockets of this process, one after the other."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one


def _address(found: tuple[str, int]) -> Address:
    return found[0].removeprefix("::ffff:").partition("%")[0], found[1]
