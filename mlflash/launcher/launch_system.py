"""What `mlflash run` needs from the system that starts processes on nodes: Slurm, or a list of hosts."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .node_assignment import NodeAssignment
from .processes import KILL_WAIT_S, kill


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
        """Where the ranks are now.

        Args:
            began: where they were when they were started.
        """
        return began

    def poll(self) -> int | None:
        """Exit code as in a shell; None while it runs."""

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        """End all ranks that can be reached, and what started them. May be called twice.

        Args:
            wait_s: seconds from SIGTERM to SIGKILL.
        """


class Step(Ranks):
    """The ranks that one process has started (see `Ranks`): that process, and how to end it.

    Args:
        process: srun or mpiexec, in a session of its own.
    """

    def __init__(self, process: subprocess.Popen[Any]):
        self._process = process

    def poll(self) -> int | None:
        """Exit code as in a shell; None while it runs."""
        code = self._process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, which passes it on to the ranks."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        """End all ranks that can be reached, and the launcher. May be called twice.

        Args:
            wait_s: seconds from SIGTERM to SIGKILL.
        """
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            kill(self._process)


class Patience:
    """How long to wait for answers: until a deadline, or a shorter time once half of them have arrived.

    Args:
        hosts: number of answers that may come.
        timeout_s, behind_s: see `Launcher.on_each`.
    """

    def __init__(self, hosts: int, timeout_s: float, behind_s: float | None):
        self._half, self._behind_s = (hosts + 1) // 2, behind_s
        self._end = time.monotonic() + timeout_s

    def answered(self, count: int) -> None:
        """Note how many answers have come so far."""
        if self._behind_s is not None and count >= self._half:
            self._end, self._behind_s = min(self._end, time.monotonic() + self._behind_s), None

    @property
    def left_s(self) -> float:
        """Seconds left to wait."""
        return self._end - time.monotonic()


Start = Callable[[NodeAssignment, Sequence[str], Mapping[str, str]], Ranks]
"""`Launcher.start`, or a function that does the same."""


class Launcher(Protocol):
    """A system that starts processes."""

    def hosts(self) -> list[str]:
        """All nodes, including spares, in order. Raises LaunchFailed if the nodes cannot be found out."""

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        """The given nodes that are out of service, with their state, as far as the system knows. Returns quickly."""

    def unwanted(self, hosts: Sequence[str]) -> dict[str, str]:
        """The given nodes on which no new run should start, with the reason. A run that is there may go on."""

    def start(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> Ranks:
        """Start a program on all ranks. ``env`` is added to the environment of this process."""

    def with_mpi(self, words: Sequence[str]) -> list[str]:
        """The command with which `start` runs ``python WORDS`` on each rank, for a program that uses MPI."""

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float, behind_s: float | None = None
                ) -> dict[str, str]:  # fmt: skip
        """Run a program once on each of the given nodes, in addition to the ranks. Return its output where it ended.

        Args:
            hosts: the nodes.
            argv: the program.
            timeout_s: deadline.
            behind_s: how much longer to wait for the others once half of the nodes have answered; None: no limit but
                the deadline.
        """
