"""What `mlflash run` needs of the system that starts processes on nodes: Slurm, or mpiexec with a list of hosts."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import LaunchFailed
from .seats import Seats

log = logging.getLogger("mlflash")

KILL_WAIT_S = 10.0


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


def spawn(command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
    """Start a process in a session of its own, without standard input.

    Args:
        command: program and arguments.
        more: for `subprocess.Popen`.

    Raises:
        LaunchFailed: it cannot be started.
    """
    try:
        return subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, "start_new_session": True, **more})
    except OSError as error:
        raise LaunchFailed(f"{command[0]} cannot be started: {error.strerror}") from error


def ask_within(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and give what it printed.

    Unlike `subprocess.run`, this does not wait for one that SIGKILL does not end.

    Raises:
        LaunchFailed: it cannot be started, or took too long.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    process = spawn(command, **pipes)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        raise LaunchFailed(f"{command[0]} took longer than {timeout_s:g} s") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session, and all in its group; one that stays is left behind, with a warning."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        log.warning("process %d %s has not ended %g s after SIGKILL, and is left behind",
                    process.pid, _how_it_is(process.pid), KILL_WAIT_S)  # fmt: skip


def _how_it_is(pid: int) -> str:
    """What a process is, and where in the kernel it waits, as far as /proc says."""
    try:
        name, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rsplit(")", 1)
        waits = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "(nothing is known of it)"
    return f"({name}, in state {rest.split()[0]}{f', in {waits}' if waits.strip('0') else ''})"


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
