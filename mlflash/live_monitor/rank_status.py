"""The status that the ranks of a running job report, from this node or from all nodes that can be asked."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from ..launcher.agents import Agents
from ..launcher.node_watch import ask
from ..telemetry.heartbeat import read_heartbeats

Heartbeat = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Look:
    """The status of a job at one time."""

    at: float  # seconds since 1970
    heartbeats: tuple[Heartbeat, ...] = ()  # the newest of each rank, by rank
    free: tuple[tuple[str, int], ...] = ()  # free bytes of memory, by host
    silent: tuple[str, ...] = ()  # hosts that did not answer
    wrong: str = ""  # why there is no newer look
    unread: tuple[str, ...] = ()  # why some heartbeats could not be read

    @property
    def committed(self) -> int | None:
        """The newest step that all ranks know to be a checkpoint."""
        steps = [heartbeat["committed"] for heartbeat in self.heartbeats]
        return None if None in steps else min(steps, default=None)

    @property
    def seen(self) -> set[str]:
        return {str(heartbeat["node"]) for heartbeat in self.heartbeats}

    @property
    def nodes(self) -> int:
        """Number of nodes of the job, also of those that were not asked."""
        return max((int(heartbeat.get("nodes", 0)) for heartbeat in self.heartbeats), default=0)


def look_here(memory: str, job: str) -> Look:
    """Look at this node."""
    at = time.time()
    space = os.statvfs(memory)
    heard = read_heartbeats(memory, job)
    free = ((socket.gethostname(), space.f_bavail * space.f_frsize),)
    return Look(at, _newest(heard.heartbeats), free, unread=tuple(heard.unread))


def look_everywhere(agents: Agents, memory: str, job: str) -> Look:
    """Ask nodes, as `mlflash run` does."""
    at, hosts = time.time(), agents.hosts
    answers, unread = ask(agents, hosts, "status", memory=memory, job=job, interface="")
    heartbeats = [heartbeat for document in answers.values() for heartbeat in document["heartbeats"]]
    free = tuple((host, int(document["free"])) for host, document in answers.items())
    silent = tuple(host for host in hosts if host not in answers)
    return Look(at, _newest(heartbeats), free, silent, unread=tuple(unread))


def jobs_everywhere(agents: Agents, memory: str) -> list[str]:
    """Ask nodes which jobs of this user are alive there."""
    answers, _ = ask(agents, agents.hosts, "jobs", memory=memory)
    return sorted({job for document in answers.values() for job in document["jobs"]})


def _newest(heartbeats: Sequence[Heartbeat]) -> tuple[Heartbeat, ...]:
    """Return the newest heartbeat of each rank. A rank that has moved is where its process lives, or lived last.

    Nodes have different clocks, so times of heartbeats decide only among the living and among the dead.
    """

    def age(heartbeat: Heartbeat) -> tuple[bool, float]:
        return bool(heartbeat["alive"]), float(heartbeat["beat"])

    newest = {int(heartbeat["rank"]): heartbeat for heartbeat in sorted(heartbeats, key=age)}
    size = max(newest.values(), key=age)["ranks"] if newest else 0
    return tuple(newest[rank] for rank in sorted(newest) if rank < size)  # a relaunch may have fewer ranks
