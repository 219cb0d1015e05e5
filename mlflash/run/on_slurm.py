"""Slurm: one step of srun starts an agent on each node of this allocation, and a further one on a node that is back."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LaunchFailed
from ..launch.launcher_variables import AGENT as GREETING
from .launch_system import Process, System
from .on_ssh import AGENT
from .processes import ask_within, spawn

# If a number of cores per task were set, the step would get these cores for itself. Couriers must run on the cores that
# training does not use. The agent gives each rank its cores.
_CORES = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK")
_ASK_S = 30.0  # deadline of a question to Slurm
_LOST = ("down", "error", "fail", "powered_down", "powering_down", "reboot")


class OnSlurm(System):
    """See `launch_system.System`.

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
    told = ask(["squeue", "--noheader", "--jobs", job, "--format", "%N"]).strip()
    return names_in(told) if told else []


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
