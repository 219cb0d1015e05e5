"""mpiexec with a list of hosts, by Hydra (MPICH, Intel MPI) or PRRTE (Open MPI), and a remote shell."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from ..events import Queue
from ..human_readable.wording import last_words
from .launch_system import Launcher, NodeAssignment, Patience, Ranks, Step
from .processes import find_mpiexec, signal_group, spawn

log = logging.getLogger("mlflash")

_Answers = Queue[tuple[str, "str | None", str]]


class OnHosts(Launcher):
    """Starts ranks by mpiexec, see `launch_system.Launcher`. ``shell``: ssh, or a program with the arguments of ssh."""

    def __init__(self, hosts: Sequence[str], shell: str = "ssh", extra: Sequence[str] = ()):
        self._hosts, self._shell, self._extra = list(hosts), shell, list(extra)
        self._local = {"localhost", socket.gethostname()}
        self._shown = set[tuple[str, str]]()  # hosts, and why they have not answered

    def hosts(self) -> list[str]:
        return list(self._hosts)

    def start(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> Ranks:
        path, vendor = find_mpiexec()
        alone = set(seats.hosts) <= self._local
        count, per_node = str(seats.ranks), str(seats.ranks_per_node)
        if vendor == "openmpi":
            hosts = ",".join(f"{host}:{per_node}" for host in seats.hosts)
            command = [path, "--host", hosts, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-n", count]
            command += [word for name in env for word in ("-x", name)]
            command += [] if alone else ["--prtemca", "plm_ssh_agent", self._shell]
        else:
            way = ["-launcher", "fork"] if alone else ["-launcher", "ssh", "-launcher-exec", self._shell]
            command = [path, *way, "-hosts", ",".join(seats.hosts), "-ppn", per_node, "-n", count]
        whole = {**os.environ, **env}
        return Step(spawn([*command, *self._extra, *argv], env=whole))

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float, behind_s: float | None = None
                ) -> dict[str, str]:  # fmt: skip
        patience = Patience(len(hosts), timeout_s, behind_s)
        told: dict[str, str] = {}
        answers: _Answers = Queue()
        running: dict[str, subprocess.Popen[str]] = {}
        try:
            for host in dict.fromkeys(hosts):
                words = list(argv) if host in self._local else [self._shell, host, shlex.join(argv)]
                process = spawn(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
                running[host] = process
                given = (host, process, answers)
                threading.Thread(target=_listen, args=given, name="mlflash-lines", daemon=True).start()
            for host, text, wrong in patience.received(answers) if running else ():
                del running[host]
                if text is not None:
                    told[host] = text
                elif (host, wrong) not in self._shown:
                    self._shown.add((host, wrong))
                    log.warning("%s does not answer: %s", host, wrong)
                if not running:
                    break
                patience.answered(len(told))
        finally:
            for process in running.values():  # the threads end when these end
                signal_group(process, signal.SIGKILL)
        return told


def _listen(host: str, process: subprocess.Popen[str], answers: _Answers) -> None:
    """Put the output of a process into a queue when it ends; None, and its last words, if it failed."""
    text, wrong = None, ""
    try:
        said, wrong = process.communicate()
        text = said if process.returncode == 0 else None
    finally:
        answers.put((host, text, last_words(wrong)))
