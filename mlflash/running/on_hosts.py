"""mpiexec with a list of hosts: Hydra (MPICH, Intel MPI) or PRRTE (Open MPI), and a remote shell."""

from __future__ import annotations

import concurrent.futures
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from ..demo.launch import find_mpiexec
from .launcher import Patience, Step
from .seats import Seats


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

    def on_each(self, hosts: Sequence[str], argv: Sequence[str], timeout_s: float, behind_s: float | None = None
                ) -> dict[str, str]:  # fmt: skip
        patience = Patience(len(hosts), timeout_s, behind_s)
        told: dict[str, str] = {}
        with concurrent.futures.ThreadPoolExecutor(max(1, len(hosts))) as pool:
            running = {host: self._run_on(host, argv) for host in hosts}
            texts = {pool.submit(process.communicate): host for host, process in running.items()}
            waiting = set(texts)
            while waiting and patience.left_s > 0:
                ended, waiting = concurrent.futures.wait(waiting, patience.left_s, concurrent.futures.FIRST_COMPLETED)
                told |= {texts[one]: one.result()[0] for one in ended if running[texts[one]].returncode == 0}
                patience.answered(len(told))
            for one in waiting:
                os.killpg(running[texts[one]].pid, signal.SIGKILL)
        return told

    def _run_on(self, host: str, argv: Sequence[str]) -> subprocess.Popen[str]:
        words = list(argv) if host in self._local else [self._shell, host, shlex.join(argv)]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                text=True, start_new_session=True)  # fmt: skip
