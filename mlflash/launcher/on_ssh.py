"""A list of hosts and a remote shell, without a launcher of MPI: `ranks_by_ssh` starts the ranks.

Ranks find each other as under torchrun, by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR (the host of
rank 0) and MASTER_PORT (a free port, another one for each start). Their couriers still use MPI (`wireup`).
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from ..errors import LaunchFailed
from ..wireup.launcher_variables import without_rank
from ..wireup.own_process import running
from .host_agent import Spec
from .node_assignment import NodeAssignment
from .on_hosts import OnHosts
from .ranks_by_ssh import HostOfRanks, RanksBySsh

AGENT = "mlflash.launcher.host_agent"
"""The module that is run on each host."""
# Variables of a login or of one host; they are not sent to other hosts.
_STAYS = frozenset({
    "_", "DISPLAY", "HOME", "HOST", "HOSTNAME", "KRB5CCNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL",
    "TERM", "USER", "WINDOWID", "XAUTHORITY",
})  # fmt: skip
_STAY = ("DBUS_", "SSH_", "SUDO_", "TMUX", "XDG_")
_OF_PYTHON = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")  # the agent itself may need them


class OnSsh(OnHosts):
    """Starts ranks by a remote shell, see `launch_system.Launcher`.

    Args:
        hosts: the nodes, including spares, as the shell takes them.
        shell: ssh, or a program with the arguments of ssh.
    """

    def __init__(self, hosts: Sequence[str], shell: str = "ssh"):
        super().__init__(hosts, shell)
        self._used: list[int] = []  # ports of earlier starts

    def start(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> RanksBySsh:
        specs = self._specs(seats, argv, env)
        hosts = [HostOfRanks(host, self._command(host), spec) for host, spec in zip(seats.hosts, specs, strict=True)]
        return RanksBySsh(hosts, self._meets(seats.hosts))

    def _specs(self, seats: NodeAssignment, argv: Sequence[str], env: Mapping[str, str]) -> list[Spec]:
        """What to start on each host."""
        environment = {**travelling(os.environ), **env}
        per_node = seats.ranks_per_node
        try:
            here = os.getcwd()
        except OSError as error:
            raise LaunchFailed(f"ranks have no directory to start in: {error.strerror}") from error
        return [Spec(list(argv), environment, here, number * per_node, per_node, seats.ranks, self._used,
                     local_size=per_node) for number in range(len(seats.hosts))]  # fmt: skip

    def _meets(self, hosts: Sequence[str]) -> Callable[[int], dict[str, str]]:
        """A function from a free port of the first host to the variables with which ranks find each other."""
        main = self._main_address(hosts)

        def meets(port: int) -> dict[str, str]:
            self._used.append(port)
            return {"MASTER_ADDR": main, "MASTER_PORT": str(port)}

        return meets

    def with_mpi(self, words: Sequence[str]) -> list[str]:
        return [*running("mlflash.command_line.run_on_ranks"), *words]

    def _command(self, host: str) -> list[str]:
        agent = running(AGENT)
        if host in self._local:
            return agent
        needed = [f"{name}={os.environ[name]}" for name in _OF_PYTHON if name in os.environ]
        return [self._shell, host, shlex.join(["env", *needed, *agent] if needed else agent)]

    def _main_address(self, hosts: Sequence[str]) -> str:
        """The address at which the ranks reach the host of rank 0."""
        if set(hosts) <= self._local:
            return "127.0.0.1"
        return socket.gethostname() if hosts[0] in self._local else address_of(hosts[0])


def address_of(host: str) -> str:
    """The name or address of a host that is written as ssh takes it.

    Example: ``me@node1`` and ``ssh://me@node1:2222`` are node1, ``me@fe80::1`` and ``[fe80::1]`` are fe80::1.
    """
    if host.startswith("ssh://"):
        return urlsplit(host).hostname or host
    name = host.rpartition("@")[2]
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that ranks on other hosts get, as from mpiexec: all but those of this host."""
    return {name: value for name, value in without_rank(environment).items()
            if name not in _STAYS and not name.startswith(_STAY)}  # fmt: skip
