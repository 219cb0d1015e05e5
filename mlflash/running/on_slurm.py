"""Slurm: a step of srun on chosen nodes of this allocation, and short steps beside it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchFailed
from .launcher import Step
from .seats import Seats

_ASK_S = 30.0  # deadline of a question to Slurm
_LOST = ("down", "error", "fail", "powered_down", "powering_down", "reboot", "unknown")
_TOLD = "mlflash-told:"  # before each line that a program on a node prints


class OnSlurm:
    """Starts ranks by srun, see `launcher.Launcher`.

    Args:
        job: id of the allocation.
        mpi: what srun's --mpi is to be; "" leaves it to Slurm.
        extra: further words for srun, for the training only.
    """

    def __init__(self, job: str, mpi: str = "", extra: Sequence[str] = ()):
        self._job, self._mpi, self._extra = job, mpi, list(extra)
        self._starts = 0
        self._folder = tempfile.TemporaryDirectory(prefix="mlflash-run-")

    def hosts(self) -> list[str]:
        return _ask(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).split()

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        try:
            told = _ask(["squeue", "--noheader", "--jobs", self._job, "--format", "%N"]).strip()
            ours = _ask(["scontrol", "show", "hostnames", told]).split() if told else hosts
            states = self._states(hosts)
        except LaunchFailed:  # slurmctld does not answer: what it does not say is not so
            return {}
        lost = {host: state for host, state in states.items() if is_lost(state)}
        # With --no-kill Slurm takes a dead node out of the job for good, also where it comes up again.
        return {host: "not of this job any more" for host in hosts if host not in ours} | lost

    def unwanted(self, hosts: Sequence[str]) -> dict[str, str]:
        try:
            return {host: state for host, state in self._states(hosts).items() if state.startswith("drain")}
        except LaunchFailed:
            return {}

    def _states(self, hosts: Sequence[str]) -> dict[str, str]:
        text = _ask(["sinfo", "--noheader", "--Node", "--nodes", ",".join(hosts), "--format", "%N %T"])
        return {host: state for host, state in (line.split() for line in text.splitlines()) if host in hosts}

    def start(self, seats: Seats, argv: Sequence[str], env: Mapping[str, str]) -> Step:
        self._starts += 1
        hosts = Path(self._folder.name, f"hosts{self._starts}")
        hosts.write_text("".join(f"{host}\n" for host in seats.hosts_of_ranks()))
        name = f"mlflash-{self._starts}"
        # Overlapping: of a step that a node died under Slurm does not give the cores back for a while.
        command = ["srun", "--overlap", "--no-kill", "--kill-on-bad-exit=1", "--distribution=arbitrary",
                   "--job-name", name, f"--nodes={len(seats.hosts)}", f"--ntasks={seats.ranks}"]  # fmt: skip
        command += [f"--mpi={self._mpi}"] if self._mpi else []
        whole = {**os.environ, **env, "SLURM_HOSTFILE": str(hosts)}
        process = subprocess.Popen([*command, *self._extra, *argv], env=whole, start_new_session=True,
                                   stdin=subprocess.DEVNULL)  # fmt: skip
        return _SlurmStep(process, self._job, name)

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float) -> dict[str, str]:
        """Slurm does not say which node a line is from: the program's lines are marked with the node's name."""
        mark = f'"$@" | sed "s/^/{_TOLD}$SLURMD_NODENAME:/"'
        command = ["srun", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--mpi=none", "--mem=0",
                   f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1",
                   f"--nodelist={','.join(hosts)}", "sh", "-c", mark, "sh", *argv]  # fmt: skip
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True, start_new_session=True)  # fmt: skip
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:  # some node does not answer; the others have
            Step(process).end()
            text, _ = process.communicate()
        told: dict[str, str] = {}
        for line in text.splitlines():
            if line.startswith(_TOLD):
                host, _, rest = line.removeprefix(_TOLD).partition(":")
                told[host] = told.get(host, "") + rest + "\n"
        return told


class _SlurmStep(Step):
    """A step of srun: where a node of it is dead, srun itself does not end by a signal."""

    def __init__(self, process: subprocess.Popen[Any], job: str, name: str):
        super().__init__(process)
        self._job, self._name = job, name

    def end(self) -> None:
        if (number := self._number()) is not None:
            _ask(["scancel", "--signal=TERM", number], check=False)
        super().end()
        if (number := self._number()) is not None:
            _ask(["scancel", "--signal=KILL", number], check=False)

    def _number(self) -> str | None:
        """Job and step as Slurm names them; None where it has ended."""
        text = _ask(["squeue", "--noheader", "--steps", "--jobs", self._job, "--format", "%i %j"], check=False)
        steps = [line.split() for line in text.splitlines()]
        return next((words[0] for words in steps if words[1:] == [self._name]), None)


def is_lost(state: str) -> bool:
    """Whether a node that sinfo calls so is out of service; one that is only being drained goes on training."""
    return state.endswith("*") or state.rstrip("*$~#!%@^+-").lower() in _LOST


def _ask(command: Sequence[str], check: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if check:
            raise LaunchFailed(f"Slurm does not answer: {error}") from error
        return ""
    if check and done.returncode:
        raise LaunchFailed(f"{' '.join(command)} failed", found=done.stderr.strip() or done.returncode)
    return done.stdout
