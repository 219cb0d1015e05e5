"""What `mlflash run` needs of the system that starts processes on nodes: Slurm, or mpiexec with a list of hosts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .seats import Seats

_KILL_WAIT_S = 10.0


class Step:
    """The ranks of one start: the process that started them, and how to end them.

    Args:
        process: srun or mpiexec; in a session of its own.
    """

    def __init__(self, process: subprocess.Popen[Any]):
        self._process = process

    def poll(self) -> int | None:
        """Exit code as a shell gives it; None while it runs."""
        code = self._process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, which passes it on to the ranks."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """End all ranks that can be reached, and the launcher. Waits some seconds at most; may be called twice."""
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_KILL_WAIT_S)


class Launcher(Protocol):
    """A system that starts processes."""

    def hosts(self) -> list[str]:
        """The nodes that there are, spares too, in order.

        Raises:
            LaunchFailed: they cannot be told.
        """

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        """Which of some nodes are out of service, and in which state, as far as the system knows. Takes moments."""

    def unwanted(self, hosts: Sequence[str]) -> dict[str, str]:
        """Which of some nodes no run should be started on, though one that is there may go on; and why."""

    def start(self, seats: Seats, argv: Sequence[str], env: Mapping[str, str]) -> Step:
        """Start a program on all ranks; ``env`` is what it is given besides the own environment."""

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float) -> dict[str, str]:
        """Run a program once on each of some nodes, beside the ranks; gives what it printed where it ended in time."""
