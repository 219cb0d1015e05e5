"""The status that the ranks of a running job report, from this node or from all nodes that can be asked."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import LaunchFailed, MlflashError
from ..events import Event
from ..launcher.launch_system import Launcher
from ..launcher.node_watch import ask
from ..telemetry.heartbeat import all_heartbeats

Heartbeat = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Look:
    """The status of a job at one time.

    Attributes:
        at: seconds since 1970.
        heartbeats: the heartbeats, by rank.
        free: free bytes of memory, by host.
        silent: hosts that did not answer.
        wrong: why no host could be asked. Empty if all is well.
        unread: why some heartbeats could not be read, in words.
    """

    at: float
    heartbeats: tuple[Heartbeat, ...] = ()
    free: tuple[tuple[str, int], ...] = ()
    silent: tuple[str, ...] = ()
    wrong: str = ""
    unread: tuple[str, ...] = ()


def look_here(memory: str, job: str) -> Look:
    """Look at this node, and at all nodes that are emulated on it. Not collective."""
    at = time.time()
    space = os.statvfs(memory)
    heard = all_heartbeats(memory, job)
    free = ((socket.gethostname(), space.f_bavail * space.f_frsize),)
    return Look(at, _newest(heard.heartbeats), free, unread=tuple(heard.unread))


def look_everywhere(launcher: Launcher, hosts: Sequence[str], memory: str, job: str) -> Look:
    """Ask nodes, as `mlflash run` does. Not collective."""
    at = time.time()
    try:
        said, unread = ask(launcher, hosts, memory, job)
    except LaunchFailed as error:
        return Look(at, silent=tuple(hosts), wrong=str(error))
    heartbeats = [heartbeat for document in said.values() for heartbeat in document["heartbeats"]]
    free = tuple((host, int(document["free"])) for host, document in said.items())
    return Look(at, _newest(heartbeats), free, tuple(host for host in hosts if host not in said), unread=tuple(unread))


def jobs_everywhere(launcher: Launcher, hosts: Sequence[str], memory: str) -> list[str]:
    """Ask nodes which jobs of this user are alive there. Not collective. LaunchFailed: no node can be asked."""
    return sorted({job for document in ask(launcher, hosts, memory)[0].values() for job in document["jobs"]})


def _newest(heartbeats: Sequence[Heartbeat]) -> tuple[Heartbeat, ...]:
    """Return the newest heartbeat of each rank. A rank that has moved is where its process lives, or lived last.

    Nodes have different clocks, so times of heartbeats decide only among the living and among the dead.
    """

    def age(heartbeat: Heartbeat) -> tuple[bool, float]:
        return bool(heartbeat["alive"]), float(heartbeat["beat"])

    found: dict[int, Heartbeat] = {}
    for heartbeat in sorted(heartbeats, key=age):
        found[int(heartbeat["rank"])] = heartbeat
    size = max(found.values(), key=age)["ranks"] if found else 0
    return tuple(found[rank] for rank in sorted(found) if rank < size)  # a relaunch may have fewer ranks


class Watch:
    """Looks again and again on its own thread, so that a node that does not answer cannot block the terminal.

    Args:
        look: looks once.
        every_s: seconds from the end of a look to the next.
    """

    def __init__(self, look: Callable[[], Look], every_s: float):
        self._look, self._every_s = look, every_s
        self._over = Event()
        self.last = look()
        threading.Thread(target=self._keep_looking, name="mlflash-top", daemon=True).start()

    def _keep_looking(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self.last = self._look()
            except Exception as error:  # show any error: the next look may succeed
                why = str(error) if isinstance(error, MlflashError) else repr(error)
                self.last = dataclasses.replace(self.last, wrong=f"the last look failed: {why}")

    def end(self) -> None:
        """Stop looking."""
        self._over.set()
