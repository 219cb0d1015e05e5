"""What `mlflash run` needs from the system that starts processes on nodes: Slurm, or a list of hosts."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .processes import signal_group

Process = subprocess.Popen[bytes]


class System(Protocol):
    """The system that has the nodes, and that starts agents on them: Slurm, or a remote shell.

    Attributes:
        hosts: all nodes, including spares, in order.
        program: what starts agents, for messages.
        is_here: whether all nodes are this host.
    """

    hosts: list[str]
    program: str
    is_here: bool = False

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        """The given nodes that are out of service, with their state, as far as the system knows. Returns quickly."""
        return {}

    def unwanted(self, hosts: Sequence[str]) -> dict[str, str]:
        """The given nodes on which no new run should start, with the reason. A run that is there may go on."""
        return {}

    def address_of(self, host: str) -> str:
        """The name or address at which ranks reach a node."""
        return host

    def start_agents(self, hosts: list[str], greeting: Mapping[str, Any], **more: Any) -> dict[Process, list[str]]:
        """Start an agent on each of these nodes. Return the processes that do it, each with its nodes.

        Args:
            greeting: what each agent must know (see `launch.agent`); nobody else may.
            more: for `processes.spawn`.
        """

    def end_agents(self, process: Process) -> None:
        """End a process of `start_agents` that has not ended by itself, with its agents."""
        signal_group(process, signal.SIGKILL)


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
