"""Slurm: a step of srun on chosen nodes of this allocation, and short steps in addition."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchFailed
from ..events import Queue
from .launch_system import Patience, Step
from .node_assignment import NodeAssignment
from .processes import KILL_WAIT_S, LastLines, ask_within, spawn

log = logging.getLogger("mlflash")

_ASK_S = 30.0  # deadline of a question to Slurm
_ENVIRONMENT = "--export=ALL"  # in a job of `sbatch --export=NONE`, too: ranks need what mlflash run tells them
_LOST = ("down", "error", "fail", "powered_down", "powering_down", "reboot")
STEPS = "mlflash-"
"""Prefix of the names of our steps."""
COURIERS = f"{STEPS}couriers"
"""Name of the step that starts the couriers."""
_TERM_WAIT_S, _GONE_WAIT_S = 5.0, 1.0  # pause after each signal to ranks of a `mlflash run` that is gone
_TOLD = "mlflash-told:"  # prefix of each line that a program on a node prints


class OnSlurm:
    """Starts ranks by srun, see `launch_system.Launcher`.

    Args:
        job: id of the allocation.
        mpi: the value of srun's --mpi; "" leaves it to Slurm.
        extra: further arguments for the srun that starts ranks.

    Attributes:
        job, mpi, extra: as given.
    """

    def __init__(self, job: str, mpi: str = "", extra: Sequence[str] = ()):
        self.job, self.mpi, self.extra = job, mpi, list(extra)
        self._starts = 0
        self._shown = set[str]()  # what nodes have said, with 0 for each number

    def hosts(self) -> list[str]:
        return ask(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).split()

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        try:
            ours = hosts_of(self.job) or hosts
            states = states_of(hosts)
        except LaunchFailed:  # slurmctld does not answer: treat no node as gone
            return {}
        lost = {host: state for host, state in states.items() if is_lost(state)}
        # With --no-kill Slurm removes a dead node from the job for good, even if the node comes up again.
        return {host: "no longer part of this job" for host in hosts if host not in ours} | lost

    def unwanted(self, hosts: Sequence[str]) -> dict[str, str]:
        try:
            return {host: state for host, state in states_of(hosts).items() if state.startswith("drain")}
        except LaunchFailed:
            return {}

    def start(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> Step:
        self._starts += 1
        try:
            file, hosts = tempfile.mkstemp(prefix="mlflash-hosts-")
            with open(file, "w") as lines:
                lines.writelines(f"{host}\n" for host in seats.hosts_of_ranks())
        except OSError as error:
            raise LaunchFailed(f"the list of hosts cannot be written to a temporary file: {error}") from error
        name = f"{STEPS}{self._starts}"
        # --overlap, because Slurm keeps the cores of a step for a while after one of its nodes has died.
        command = ["srun", _ENVIRONMENT, "--overlap", "--no-kill", "--kill-on-bad-exit=1", "--distribution=arbitrary",
                   "--job-name", name, f"--nodes={len(seats.hosts)}", f"--ntasks={seats.ranks}"]  # fmt: skip
        command += [f"--mpi={self.mpi}"] if self.mpi else []
        whole = {**os.environ, **env, "SLURM_HOSTFILE": hosts}
        process = spawn([*command, *self.extra, *argv], env=whole)
        return SlurmStep(process, self.job, name, Path(hosts))

    def end_steps(self) -> None:
        """End all ranks of this job, no matter which process started them."""
        for name, wait_s in (("TERM", _TERM_WAIT_S), ("KILL", _GONE_WAIT_S)):
            if ours := [number for number, step in _steps_of(self.job) if step.startswith(STEPS)]:
                ask(["scancel", f"--signal={name}", *ours], check=False)
                time.sleep(wait_s)

    def with_mpi(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "mpi4py", *words]

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float, behind_s: float | None = None
                ) -> dict[str, str]:  # fmt: skip
        """See `Launcher.on_each`. Each line gets the name of its node, because Slurm does not say where it is from."""
        mark = f'"$@" | sed "s/^/{_TOLD}$SLURMD_NODENAME:/"'
        command = beside(hosts, [], ["sh", "-c", mark, "sh", *argv])
        process = spawn(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        wrong = LastLines(process)
        told: dict[str, str] = {}
        patience = Patience(len(hosts), timeout_s, behind_s)
        for line in _lines(process, patience):
            if line.startswith(_TOLD):
                host, _, rest = line.removeprefix(_TOLD).partition(":")
                told[host] = told.get(host, "") + rest
                patience.answered(len(told))
        Step(process).end()  # some nodes may not have answered
        if len(told) < len(hosts):
            self._warn_once(wrong.text())
        return told

    def _warn_once(self, text: str) -> None:
        """Show what srun and the programs on nodes have said, if no similar text was shown before."""
        alike = re.sub(r"\d+", "0", text)
        if alike not in self._shown:
            self._shown.add(alike)
            log.warning("not all nodes have answered: %s", text)


class SlurmStep(Step):
    """A step of srun. If one of its nodes is dead, srun itself does not end by a signal.

    Args:
        process: srun.
        job: id of the allocation.
        name: of the step, unique in the job.
        hosts: a file to delete when the step ends; None: none.
    """

    def __init__(self, process: subprocess.Popen[Any], job: str, name: str, hosts: Path | None = None):
        super().__init__(process)
        self._job, self._name, self._hosts = job, name, hosts

    def end(self, wait_s: float = KILL_WAIT_S) -> None:
        self._cancel("TERM")
        super().end(wait_s)
        self._cancel("KILL")
        if self._hosts is not None:
            self._hosts.unlink(missing_ok=True)

    def let_end(self, wait_s: float) -> None:
        """Send SIGTERM to the tasks and give them time to end. A signal to srun itself would make it kill them.

        Args:
            wait_s: seconds after which the tasks and srun are ended.
        """
        self._cancel("TERM")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if self.poll() is None:
            self.end()

    def _cancel(self, name: str) -> None:
        """Send a signal to the tasks."""
        number = next((number for number, step in _steps_of(self._job) if step == self._name), None)
        if number is not None:
            ask(["scancel", f"--signal={name}", number], check=False)


def _steps_of(job: str) -> list[list[str]]:
    """Number and name of each step that still runs."""
    text = ask(["squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i %j"], check=False)
    return [words for line in text.splitlines() if len(words := line.split()) == 2]


def _lines(process: subprocess.Popen[str], patience: Patience) -> Iterator[str]:
    """The lines that a process prints, until the patience ends."""
    assert process.stdout is not None
    source = process.stdout
    lines: Queue[str | None] = Queue()

    def read() -> None:
        try:
            with source:
                for line in source:
                    lines.put(line)
        finally:
            lines.put(None)

    threading.Thread(target=read, name="mlflash-look-lines", daemon=True).start()
    while (left := patience.left_s) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            continue
        if line is None:
            return
        yield line


def own_id(environ: Mapping[str, str]) -> str:
    """The id of the job of this environment. For an array: the last task's own number would mean the whole array."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def beside(hosts: Sequence[str], options: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The srun command that runs a program once on each of the given nodes, in addition to the ranks."""
    count = len(hosts)
    return ["srun", _ENVIRONMENT, "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--mpi=none", "--mem=0",
            f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}",
            *options, *argv]  # fmt: skip


def hosts_of(job: str) -> list[str]:
    """The nodes that a job has now; none if it has ended. Raises LaunchFailed if Slurm does not answer."""
    told = ask(["squeue", "--noheader", "--jobs", job, "--format", "%N"]).strip()
    return ask(["scontrol", "show", "hostnames", told]).split() if told else []


def states_of(hosts: Sequence[str]) -> dict[str, str]:
    """The state of each node, as sinfo prints it. Raises LaunchFailed if Slurm does not answer."""
    # --all: nodes of hidden partitions, too.
    text = ask(["sinfo", "--noheader", "--all", "--Node", "--nodes", ",".join(hosts), "--format", "%N %T"])
    return {words[0]: words[1] for line in text.splitlines() if len(words := line.split()) == 2 and words[0] in hosts}


def is_lost(state: str) -> bool:
    """Whether a node in this state of sinfo is out of service.

    A node that is only being drained goes on training. Of an unknown one slurmctld has not heard since its own start.
    """
    return state.endswith("*") or state.rstrip("*$~#!%@^+-").lower() in _LOST


def ask(command: Sequence[str], check: bool = True) -> str:
    """Run a command of Slurm; return what it printed.

    Raises:
        LaunchFailed: it failed or took too long. With ``check=False`` the function returns "" instead.
    """
    try:
        done = ask_within(command, _ASK_S)
    except LaunchFailed as error:
        if check:
            raise LaunchFailed(f"Slurm does not answer: {error.message}") from error
        return ""
    if check and done.returncode:
        raise LaunchFailed(f"{' '.join(command)} failed", found=done.stderr.strip() or done.returncode)
    return done.stdout
