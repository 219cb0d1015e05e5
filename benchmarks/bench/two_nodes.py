"""Makes two nodes from namespaces, each with its own network and one rank. Only root can make them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from .launch import HOME, Lines, lines_of, program, run_until

sys.path[:0] = [str(HOME.parent / "tests" / "support"), str(HOME.parent / "tests")]  # the project's model of nodes

from cluster.jobs import NETMODS, NETMODS_HERE, mpiexec_on  # noqa: E402
from cluster.nodes import TOOLS, Nodes  # noqa: E402

HOSTS = ("host1", "host2")
KILL_S = 10.0  # between SIGTERM and SIGKILL
NETWORKS: dict[str, dict[str, str]] = {name: NETMODS[name] for name in NETMODS_HERE}
"""The variables, by name, that make MPI send over the cables between the nodes. The first is the default of users."""

__all__ = ["HOSTS", "NETWORKS", "Nodes", "launch_on", "why_not_here"]


def why_not_here() -> str:
    """Return why this machine cannot make two nodes, or "" if it can."""
    if os.geteuid() != 0:
        return "only root can make nodes of namespaces: run this as root, on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"this needs {', '.join(missing)} (packages hostname, iproute2, mount, util-linux)" if missing else ""


def launch_on(
    nodes: Nodes, script: Path, arguments: list[str], timeout_s: float, environment: Mapping[str, str]
) -> tuple[str, Lines]:
    """Run a script on one rank of each node, like `bench.launch.launch`. Afterward end all processes of the nodes."""
    out = nodes.path / "out.jsonl"
    out.unlink(missing_ok=True)
    argv, env = program(script, out, "/dev/shm", arguments)
    assignments = [f"{name}={value}" for name, value in {**environment, **env, "OMP_NUM_THREADS": "1"}.items()]
    command = mpiexec_on(nodes, HOSTS, 1, ["env", *assignments, *argv])
    try:
        why = run_until(command, timeout_s, KILL_S, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return why, lines_of(out)
    finally:
        nodes.stop_all()
