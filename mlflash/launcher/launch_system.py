"""What `mlflash run` needs of the system that starts processes on nodes: Slurm, or mpiexec or ssh and hosts."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .node_assignment import NodeAssignment
from .processes import KILL_WAIT_S, kill


class Ranks(Protocol):
    """The ranks of one start; where nothing else is said they stay where they began, and a lost one is not replaced.

    Attributes:
        replaces: whether it finds out by itself who is lost, rank or node, and replaces them: neither is its end.
        rounds: how often all ranks have begun, or were to: more than once where any was replaced.
    """

    replaces: bool = False

    @property
    def rounds(self) -> int:  # noqa: D102
        return 1

    def seats(self, began: NodeAssignment) -> NodeAssignment:
        """Where its ranks are now.

        Args:
            began: where they were when they were started.
        """
        return began

    def poll(self) -> int | None:
        """Exit code as a shell gives it; None while it runs."""

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        """End all ranks that can be reached, and whatever started them; may be called twice.

        Args:
            wait_s: seconds from SIGTERM to SIGKILL.
        """


class Step(Ranks):
    """The ranks that one process has started, see `Ranks`: that process, and how to end them.

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

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        """End all ranks that can be reached, and the launcher; may be called twice.

        Args:
            wait_s: seconds from SIGTERM to SIGKILL.
        """
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            kill(self._process)


class Patience:
    """Until when to wait for answers: to a deadline, or not so long once half of them are there.

    Args:
        hosts: answers that may come.
        timeout_s, behind_s: see `Launcher.on_each`.
    """

    def __init__(self, hosts: int, timeout_s: float, behind_s: float | None):
        self._half, self._behind_s = (hosts + 1) // 2, behind_s
        self._end = time.monotonic() + timeout_s

    def answered(self, count: int) -> None:
        """Note how many have come so far."""
        if self._behind_s is not None and count >= self._half:
            self._end, self._behind_s = min(self._end, time.monotonic() + self._behind_s), None

    @property
    def left_s(self) -> float:
        """Seconds to wait still."""
        return self._end - time.monotonic()


Start = Callable[[NodeAssignment, Sequence[str], Mapping[str, str]], Ranks]
"""`Launcher.start`, or what does as it does."""


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

    def start(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> Ranks:
        """Start a program on all ranks; ``env`` is what it is given besides the own environment."""

    def with_mpi(self, words: Sequence[str]) -> list[str]:
        """How ranks run ``python WORDS``, a program that is done with MPI, where `start` starts them."""

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float, behind_s: float | None = None
                ) -> dict[str, str]:  # fmt: skip
        """Run a program once on each of some nodes, beside the ranks; gives what it printed where it ended in time.

        Args:
            hosts: the nodes.
            argv: the program.
            timeout_s: deadline.
            behind_s: how much longer to wait for the others once half of the nodes have answered; None: no limit but
                the deadline.
        """
