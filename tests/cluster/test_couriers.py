"""Trainers on nodes that are really apart start their couriers with one call, and never touch MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.jobs import NETMODS, mpiexec_on
from cluster.nodes import Nodes
from harness import SUPPORT
from waiting import PATIENCE_S, until

TRAINER = SUPPORT / "launch_trainer.py"


def trainer(folder: Path, *more: str, netmod: Mapping[str, str] = NETMODS["ofi"], **options: Any
            ) -> list[str]:  # fmt: skip
    """The command of a trainer that runs two epochs, and writes what it knows into a folder."""
    names = {**netmod, "PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    argv = [sys.executable, str(TRAINER), json.dumps({"do": "epochs", "epochs": 2, "folder": str(folder), **options})]
    return ["env", *(f"{name}={value}" for name, value in names.items()), *more, *argv]


def check(nodes: Nodes, folder: Path, launcher: str, expected: list[int]) -> None:
    """All ranks had both epochs, each knew who shares its node, and nothing is left on any node."""
    for rank in range(len(expected)):
        said = json.loads((folder / str(rank)).read_text())
        assert (said["launcher"], said["status"], said["nodes"]) == (launcher, 0, expected)
        assert len(said["took"]) == 1 and "mpi4py" not in said["modules"]
        print(f"{launcher}, rank {rank}, courier killed to allreduce done: {1e3 * said['took'][0]:.0f} ms")
    for host in nodes.names:
        until(lambda host=host: not nodes.running(host, "mlflash.launch.agent"), f"no process is left on {host}")
        assert "mpich" not in nodes.run(host, "ls", "/dev/shm")


def test_ranks_on_three_nodes_have_couriers_and_hydra_notices_nothing(nodes: Nodes) -> None:
    command = mpiexec_on(nodes, ["host1", "host2", "host3"], 1, trainer(nodes.path))
    assert subprocess.run(command, timeout=PATIENCE_S, stdin=subprocess.DEVNULL).returncode == 0
    check(nodes, nodes.path, "hydra", [0, 1, 2])


def test_ranks_whose_host_names_mean_loopback_have_couriers(nodes: Nodes) -> None:
    """As Debian's installer writes /etc/hosts. These nodes have no default route, either."""
    for host in nodes.names:
        assert "default" not in nodes.run(host, "ip", "route")
        write = f"sed '/ {host}$/d' /etc/hosts > /tmp/hosts && echo 127.0.1.1 {host} >> /tmp/hosts"
        nodes.run(host, "sh", "-c", f"{write} && mount --bind /tmp/hosts /etc/hosts")
        assert nodes.run(host, "getent", "hosts", host).split()[0] == "127.0.1.1"
    command = mpiexec_on(nodes, ["host1", "host2"], 1, trainer(nodes.path))
    assert subprocess.run(command, timeout=PATIENCE_S, stdin=subprocess.DEVNULL).returncode == 0
    check(nodes, nodes.path, "hydra", [0, 1])
