"""Slurm: a step of srun on chosen nodes of this allocation, and short steps in addition."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import is_enabled
from ..errors import LaunchFailed
from ..events import Event, Queue
from ..human_readable.wording import many
from ..wireup.own_process import running
from ..wireup.zygote_host import READY
from .launch_system import Launcher, NodeAssignment, Patience, RunOptions, Step
from .processes import KILL_WAIT_S, LastLines, ask_within, spawn

log = logging.getLogger("mlflash")

_READY_S = 20.0
_END_S = 20.0  # limit for couriers whose trainers have ended
# If a number of cores per task were set, the step would get these cores for itself. Couriers must run on the cores that
# training does not use.
_CORES = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK")
_ASK_S = 30.0  # deadline of a question to Slurm
_ENVIRONMENT = "--export=ALL"  # in a job of `sbatch --export=NONE`, too: ranks need what mlflash run tells them
_LOST = ("down", "error", "fail", "powered_down", "powering_down", "reboot")
STEPS = "mlflash-"  # prefix of the names of our steps
COURIERS = f"{STEPS}couriers"  # name of the step that starts the couriers
_TERM_WAIT_S, _GONE_WAIT_S = 5.0, 1.0  # pause after each signal to ranks of a `mlflash run` that is gone
_TOLD = "mlflash-told:"  # prefix of each line that a program on a node prints


class CourierHosts:
    """``mlflash courier`` on each node of an allocation, in a step of its own, so that commits go on when ranks end.

    When Slurm ends the ranks, it also ends everything that they have started, but nothing of another step. If this step
    cannot be started or has ended, ranks start their couriers themselves. A context manager. It waits until each node
    can start couriers.
    """

    def __init__(self, slurm: OnSlurm, options: RunOptions, environment: Mapping[str, str] = os.environ):
        self._slurm = slurm
        self._step: SlurmStep | None = None
        self._command = [*running("mlflash"), "courier", "--job", options.job, "--memory", options.memory]
        self._is_wanted = is_enabled(environment)
        self._environment = {name: value for name, value in environment.items() if name not in _CORES}
        self._left, self._are_ready = 0, Event()

    def __enter__(self) -> CourierHosts:
        if not self._is_wanted:
            return self
        try:
            hosts = self._slurm.hosts()
            self._left = len(hosts)
            words = beside(hosts, ["--cpu-bind=none", "--job-name", COURIERS], self._command)
            process = spawn(words, env=self._environment, stdout=subprocess.PIPE, text=True, errors="replace")
        except LaunchFailed as error:
            log.warning("ranks start their couriers themselves, and these end with their ranks: %s", error)
            return self
        self._step = SlurmStep(process, self._slurm.job, COURIERS)
        threading.Thread(target=self._listen, args=(process,), name="mlflash-courier-hosts", daemon=True).start()
        if not self._are_ready.wait(_READY_S) or self._left:
            log.warning("on %s of %d, ranks start their couriers themselves, and these end with their ranks",
                        many(self._left, "node"), len(hosts))  # fmt: skip
        return self

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Count the nodes that report that they are ready. Print everything else that the couriers print."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if READY not in line:
                    print(line, end="", file=sys.stderr, flush=True)
                    continue
                self._left -= 1
                if not self._left:
                    self._are_ready.set()
        self._are_ready.set()

    def __exit__(self, *failure: object) -> None:
        if self._step is not None:
            self._step.let_end(_END_S)


class OnSlurm(Launcher):
    """Starts ranks by srun, see `launch_system.Launcher`. ``mpi``: the value of srun's --mpi; "" leaves it to Slurm."""

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
                lines.writelines(f"{host}\n" * seats.ranks_per_node for host in seats.hosts)
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
        text = wrong.text() if len(told) < len(hosts) else ""
        alike = re.sub(r"\d+", "0", text)
        if len(told) < len(hosts) and alike not in self._shown:
            self._shown.add(alike)
            log.warning("not all nodes have answered: %s", text)
        return told


class SlurmStep(Step):
    """A step of srun. If one of its nodes is dead, srun itself does not end by a signal."""

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
        """Send SIGTERM to the tasks and give them time to end. A signal to srun itself would make it kill them."""
        self._cancel("TERM")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if self.poll() is None:
            self.end()

    def _cancel(self, name: str) -> None:
        number = next((number for number, step in _steps_of(self._job) if step == self._name), None)
        if number is not None:
            ask(["scancel", f"--signal={name}", number], check=False)


def _steps_of(job: str) -> list[list[str]]:
    """Number and name of each step that still runs."""
    text = ask(["squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i %j"], check=False)
    return [words for line in text.splitlines() if len(words := line.split()) == 2]


def _lines(process: subprocess.Popen[str], patience: Patience) -> Iterator[str]:
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
    for line in patience.received(lines):
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
    """Run a command of Slurm; return what it printed. LaunchFailed, or "" with ``check=False``, if it failed."""
    try:
        done = ask_within(command, _ASK_S)
    except LaunchFailed as error:
        if check:
            raise LaunchFailed(f"Slurm does not answer: {error.message}") from error
        return ""
    if check and done.returncode:
        raise LaunchFailed(f"{' '.join(command)} failed", found=done.stderr.strip() or done.returncode)
    return done.stdout
