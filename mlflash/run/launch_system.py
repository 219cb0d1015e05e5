"""What `mlflash run` needs from the system that starts processes on nodes: Slurm, or a list of hosts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import LaunchFailed
from ..launch.ranks import LOST
from .processes import KILL_WAIT_S

Process = subprocess.Popen[bytes]


@dataclasses.dataclass(frozen=True)
class NodeAssignment:
    """The nodes of a run."""

    hosts: tuple[str, ...]
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_node


def assign_nodes(hosts: Sequence[str], nodes: int, ranks_per_node: int, least: int = 0) -> NodeAssignment | None:
    """Choose the nodes of the first run. ``least``: smallest number of nodes that is enough; 0: all that are wanted."""
    return None if len(hosts) < (least or nodes) else NodeAssignment(tuple(hosts[:nodes]), ranks_per_node)


def reassign_nodes(before: NodeAssignment, fit: Sequence[str], nodes: int, least: int = 0) -> NodeAssignment | None:
    """Choose the nodes of the next run: nodes that can stay keep their seats, and spares take the empty ones.

    If there are not enough spares, the run has fewer nodes. It grows again as soon as there are enough.

    Example:
        (a, b, c) with a, c, d, e fit → (a, d, c); with a and c fit, and ``least=2`` → (a, c).
    """
    stay: Collection[str] = set(before.hosts) & set(fit)
    spares = iter([host for host in fit if host not in before.hosts])
    seats: list[str | None] = [host if host in stay else next(spares, None) for host in before.hosts]
    seats += [next(spares, None) for _ in range(nodes - len(seats))]
    taken = tuple(host for host in seats if host is not None)
    return None if len(taken) < (least or nodes) else NodeAssignment(taken, before.ranks_per_node)


class Ranks(Protocol):
    """The ranks of one start. By default they stay where they began, and a lost rank is not replaced.

    Attributes:
        replaces: whether this object itself detects lost ranks and nodes and replaces them, so that the start goes on.
        rounds: how often all ranks have begun, or were about to: more than once if any was replaced.
    """

    replaces: bool = False

    @property
    def rounds(self) -> int:  # noqa: D102
        return 1

    def seats(self, began: NodeAssignment) -> NodeAssignment:
        """Where the ranks are now, given where they were when they were started."""
        return began

    def poll(self) -> int | None:
        """Exit code as in a shell; None while it runs."""

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        """End all ranks that can be reached; SIGKILL comes ``wait_s`` after SIGTERM."""


Start = Callable[[NodeAssignment, Sequence[str], Mapping[str, str]], Ranks]
"""`agents.Agents.start`, or a function that does the same."""


class System(Protocol):
    """The system that has the nodes, and that starts agents on them: Slurm, or a remote shell.

    Attributes:
        program: what starts agents, for messages.
    """

    program: str

    def hosts(self) -> list[str]:
        """All nodes, including spares, in order. Raises LaunchFailed if the nodes cannot be found out."""

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        """The given nodes that are out of service, with their state, as far as the system knows. Returns quickly."""
        return {}

    def unwanted(self, hosts: Sequence[str]) -> dict[str, str]:
        """The given nodes on which no new run should start, with the reason. A run that is there may go on."""
        return {}

    def own_address(self) -> str:
        """The address of this host at which agents reach `mlflash run`."""

    def address_of(self, host: str) -> str:
        """The name or address at which ranks reach a node."""

    def start_agents(
        self, hosts: list[str], greeting: Mapping[str, Any], **more: Any
    ) -> list[tuple[list[str], Process]]:
        """Start an agent on each of these nodes. Return the processes that do it, each with its nodes.

        Args:
            greeting: what each agent must know (see `launch.agent`); nobody else may.
            more: for `processes.spawn`.
        """

    def end_agents(self, process: Process) -> None:
        """End a process of `start_agents` that has not ended by itself, with its agents."""


class NodeLost(LaunchFailed):
    """A node has no agent; ``code`` is the exit code of what should have started it."""

    def __init__(self, why: str, code: int = LOST):
        super().__init__(why)
        self.code = code


# The options of `mlflash run`.


class RunLog:
    """Adds lines to a file; None: nowhere. A file that cannot be written does not stop a run."""

    def __init__(self, path: Path | None):
        self._path = path

    def note(self, event: str, **fields: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError:
            self._path = None


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What to run, and how."""

    argv: Sequence[str]
    nodes: int
    ranks_per_node: int
    least: int  # smallest number of nodes that is enough, for training that reshards; 0: all
    max_restarts: int
    job: str  # job, memory: where the ranks keep their slots
    memory: str
    directory: str | None  # where to copy the newest checkpoint at the end; None: nowhere
    keep_memory: bool  # whether the slots stay in memory at the end
    hang_timeout_s: float  # seconds without a save after which a run counts as hanging; 0: never
    look_every_s: float  # seconds between two looks at the nodes
    grace_s: float  # seconds that training has for one more checkpoint after a signal to end
    gpus: int
    interface: str  # the network interface that must be up; "": no check
