"""mpiexec with a list of hosts: Hydra (MPICH, Intel MPI) or PRRTE (Open MPI), and a remote shell."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from ..demo.launch import find_mpiexec
from .launcher import Step
from .seats import Seats

_NAP_S = 0.02


class OnHosts:
    """Starts ranks by mpiexec, see `launcher.Launcher`.

    Args:
        hosts: the nodes, spares too.
        shell: what ssh is, or does as ssh does.
        extra: further words for mpiexec.
    """

    def __init__(self, hosts: Sequence[str], shell: str = "ssh", extra: Sequence[str] = ()):
        self._hosts, self._shell, self._extra = list(hosts), shell, list(extra)
        self._local = {"localhost", socket.gethostname()}

    def hosts(self) -> list[str]:
        return list(self._hosts)

    def gone(self, hosts: Sequence[str]) -> dict[str, str]:
        return {}  # only a look at each node can tell

    def unwanted(self, hosts: Sequence[str]) -> dict[str, str]:
        return {}

    def start(self, seats: Seats, argv: Sequence[str], env: Mapping[str, str]) -> Step:
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
        return Step(subprocess.Popen([*command, *self._extra, *argv], env=whole, start_new_session=True,
                                     stdin=subprocess.DEVNULL))  # fmt: skip

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float) -> dict[str, str]:
        running = {host: self._run_on(host, argv) for host in hosts}
        end = time.monotonic() + timeout_s
        told: dict[str, str] = {}
        for host, process in running.items():
            try:
                text, _ = process.communicate(timeout=max(_NAP_S, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            else:
                if process.returncode == 0:
                    told[host] = text
        return told

    def _run_on(self, host: str, argv: Sequence[str]) -> subprocess.Popen[str]:
        words = list(argv) if host in self._local else [self._shell, host, shlex.join(argv)]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                text=True, start_new_session=True)  # fmt: skip
