"""The systems that have the nodes of a run, and start an agent on each: Slurm, or ssh with a list of hosts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..errors import LaunchFailed
from ..launch.agent_process import LOADED_BY
from ..launch.launcher_variables import AGENT as GREETING
from ..launch.own_process import running
from .processes import ask_within, signal_group, spawn

Process = subprocess.Popen[bytes]
AGENT = running("mlflash.launch.agent")
# If a number of cores per task were set, the step would get these cores for itself. Couriers must run on the cores that
# training does not use. The agent gives each rank its cores.
_CORES = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK")
_ASK_S = 30.0  # deadline of a question to Slurm
_LOST = ("down", "error", "fail", "powered_down", "powering_down", "reboot")


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


class OnSsh(System):
    """See `System`. ``shell``: ssh, or a program with the arguments of ssh."""

    def __init__(self, hosts: Sequence[str], shell: str = "ssh"):
        self.hosts, self._shell = list(dict.fromkeys(hosts)), shell
        self._local = {"localhost", socket.gethostname()}
        self.is_here = set(hosts) <= self._local
        self.program = os.path.basename(shell)

    def address_of(self, host: str) -> str:
        if host in self._local:
            return "127.0.0.1" if self.is_here else socket.gethostname()
        return address_of(host)

    def start_agents(self, hosts: list[str], greeting: Mapping[str, Any], **more: Any) -> dict[Process, list[str]]:
        return {self._start_agent(host, {**greeting, "host": host}, more): [host] for host in hosts}

    def _start_agent(self, host: str, greeting: Mapping[str, Any], more: Mapping[str, Any]) -> Process:
        command = AGENT
        if host not in self._local:
            needed = [f"{name}={os.environ[name]}" for name in LOADED_BY if name in os.environ]
            command = [self._shell, host, shlex.join(["env", *needed, *AGENT] if needed else AGENT)]
        process: Process = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **more)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # if it has ended, its exit code tells
            stdin.write(json.dumps(greeting).encode() + b"\n")
        return process


def address_of(host: str) -> str:
    """The name or address of a host that is written as ssh takes it.

    Example: ``me@node1`` and ``ssh://me@node1:2222`` are node1, ``me@fe80::1`` and ``[fe80::1]`` are fe80::1.
    """
    if host.startswith("ssh://"):
        return urlsplit(host).hostname or host
    name = host.rpartition("@")[2]
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


class OnSlurm(System):
    """See `System`.

    Args:
        job: id of the job whose nodes these are.
        hosts: its nodes.
        extra: more arguments for srun, for the step of the agents.
    """

    program = "srun"

    def __init__(self, job: str, hosts: Sequence[str], extra: Sequence[str] = ()):
        self.job, self.hosts, self.extra = job, list(hosts), list(extra)
        # For each step: other commands, such as `mlflash top`, may have agents on the same nodes.
        self._names: dict[int, str] = {}

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        try:
            ours, states = hosts_of(self.job) or hosts, states_of(hosts)
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

    def start_agents(self, hosts: list[str], greeting: Mapping[str, Any], **more: Any) -> dict[Process, list[str]]:
        count, name = len(hosts), f"mlflash-{secrets.token_hex(4)}"
        # --export: in a job of `sbatch --export=NONE`, too. --overlap: Slurm keeps the cores of a step for a while
        # after one of its nodes has died.
        command = ["srun", "--export=ALL", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--mpi=none", "--mem=0",
                   "--cpu-bind=none", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
                   f"--nodelist={','.join(hosts)}", f"--job-name={name}", *self.extra, *AGENT]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in _CORES}
        environment[GREETING] = json.dumps(dict(greeting))
        process: Process = spawn(command, env=environment, stdout=subprocess.DEVNULL, **more)
        self._names[process.pid] = name
        return {process: list(hosts)}

    def end_agents(self, process: Process) -> None:
        """Cancel a step. If one of its nodes is dead, srun itself does not end by a signal."""
        text = ask(["squeue", "--noheader", "--steps", "--jobs", self.job, "--format", "%i %j"], check=False)
        name = self._names[process.pid]
        for number, step in (line.split() for line in text.splitlines() if len(line.split()) == 2):
            if step == name:
                ask(["scancel", "--signal=KILL", number], check=False)
        super().end_agents(process)


def own_id(environ: Mapping[str, str]) -> str:
    """The id of the job of this environment. For an array: the last task's own number would mean the whole array."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def hosts_of(job: str) -> list[str]:
    """The nodes that a job has now; none if it has ended. Raises LaunchFailed if Slurm does not answer."""
    nodes = ask(["squeue", "--noheader", "--jobs", job, "--format", "%N"]).strip()
    return names_in(nodes) if nodes else []


def names_in(node_list: str) -> list[str]:
    """The nodes of a list as Slurm writes it, such as ``node[2-4]``. Raises LaunchFailed if Slurm does not answer."""
    return ask(["scontrol", "show", "hostnames", node_list]).split()


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
