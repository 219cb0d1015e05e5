"""A list of hosts, and ssh or another remote shell that starts an agent on each. On this host it needs no shell."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ..launch.agent_process import LOADED_BY
from ..launch.own_process import running
from .launch_system import Process, System
from .processes import spawn

AGENT = running("mlflash.launch.agent")


class OnSsh(System):
    """See `launch_system.System`. ``shell``: ssh, or a program with the arguments of ssh."""

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
