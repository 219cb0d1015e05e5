"""Shut down the connections of a gloo group, because gloo itself cannot end calls that wait for a lost host.

If a process is killed, its connections close and gloo raises an error. If a host is cut off, nothing arrives, and gloo
waits for its timeout, which is long in training. The connections of a group are found by the addresses at which its
ranks listen. The ranks tell each other these through their store.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import ProcessGroupGloo, Store

from mlflash.memory.courier_process import read_stat

Address = tuple[str, int]
_COMPUTES = "pt_gloo_runloop"  # torch's name for these threads
_MEETS = timedelta(seconds=10)  # limit for all ranks to connect; gloo would not notice a loss meanwhile


def connect(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[ProcessGroupGloo, set[Address]]:
    """Make a gloo group. Collective over the group.

    Args:
        store: a store for this group alone.
        rank: rank of this process in the group.
        size: number of ranks in the group.
        timeout: timeout of each call.

    Returns:
        The group, and the addresses at which its ranks listen, for `shut_down`.
    """
    before = _listening()
    group = ProcessGroupGloo(store, rank, size, min(timeout, _MEETS))
    group._set_default_timeout(timeout)
    store.set(f"listens/{rank}", json.dumps(sorted(_listening() - before)))
    told = store.multi_get([f"listens/{one}" for one in range(size)])
    return group, {(host, port) for one in told for host, port in json.loads(one)}


def shut_down(listeners: Collection[Address]) -> None:
    """Shut down all connections of this process to and from these addresses. Not collective; any thread."""
    for one in _sockets():
        try:
            if _address(one.getpeername()) in listeners or _address(one.getsockname()) in listeners:
                one.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is not connected
            continue


def threads_sleep() -> bool:
    """Whether all of gloo's compute threads are waiting. Not collective."""
    for thread in os.listdir("/proc/self/task"):
        try:
            stat = read_stat(Path("/proc/self/task", thread))
        except OSError:  # it has ended
            continue
        if stat.name == _COMPUTES and stat.state != "S":
            return False
    return True


def _listening() -> set[Address]:
    return {
        _address(one.getsockname()) for one in _sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _sockets() -> Iterator[socket.socket]:
    """Give all TCP sockets of this process, one after the other."""
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
