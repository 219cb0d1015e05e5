"""Start jobs on the nodes of `nodes.py`, and read what their ranks wrote down."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import harness
import small_blocks
from cluster.nodes import HEAD, Nodes
from harness import SUPPORT, Launch, Result
from waiting import PATIENCE_S, until

from mlflash.run.processes import find_mpiexec, signal_group

WORKER = SUPPORT / "worker.py"

# Between nodes TCP over their cables, within a node MPI's own shared memory: UCX would look for faster ways,
# and on this machine it might find one that no cable is needed for.
NETMODS = {
    "ucx": {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"},
    "ofi": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}


def mpiexec_on(nodes: Nodes, hosts: Sequence[str], per_node: int, argv: Sequence[str]) -> list[str]:
    """The command that starts a program with so many ranks on each host, each time it is named."""
    path, _ = find_mpiexec()
    shell, ranks = str(nodes.shell), str(per_node * len(hosts))
    places = ",".join(f"{host}:{count * per_node}" for host, count in collections.Counter(hosts).items())
    command = [path, "-launcher", "ssh", "-launcher-exec", shell, "-hosts", places, "-n", ranks]
    return nodes.command(HEAD, [*command, *argv])


class Cluster:
    """Jobs with one job name on some nodes, one after the other; MPI uses ``netmod`` between nodes."""

    def __init__(self, nodes: Nodes, transport: str = "p2p", netmod: str = "ucx"):
        self.nodes = nodes
        self._transport, self._netmod = transport, netmod
        self._launches = 0

    def start(self, hosts: Sequence[str], program: str = "train", *, per_node: int = 1, **options: object) -> Job:
        """Start a program of worker.py with so many ranks on each host, each time it is named (one after the other)."""
        self._launches += 1
        out = self.nodes.path / f"out{self._launches}"
        out.mkdir()
        argv = [sys.executable, str(WORKER), json.dumps({"program": program, **options})]
        return Job(self.nodes, mpiexec_on(self.nodes, hosts, per_node, [*self._environment(out), *argv]), out)

    def run(self, hosts: Sequence[str], program: str = "train", *, per_node: int = 1, timeout: float = PATIENCE_S,
            **options: object) -> Result:  # fmt: skip
        return self.start(hosts, program, per_node=per_node, **options).wait(timeout)

    def run_until_all_die(self, hosts: Sequence[str], last: int, *, per_node: int = 1, **options: object) -> Result:
        """Train up to a committed step, at which every process dies at once, and wait for that."""
        job = self.start(hosts, per_node=per_node, last=last, die_at=last, die="all", **options)
        job.wait_for("committed", per_node * len(hosts))
        job.wait_for_no_rank(hosts)
        job.kill()
        return job.result()

    def _environment(self, out: Path) -> list[str]:
        """What the ranks need, as a command."""
        handed_on = {k: os.environ[k] for k in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if k in os.environ}
        environment = {
            **handed_on,
            **small_blocks.environment(),
            **NETMODS[self._netmod],
            "MLFLASH_JOB": "j",
            "MLFLASH_TRANSPORT": self._transport,
            "OMP_NUM_THREADS": "1",
            "OUT": str(out),
            "PYTHONWARNINGS": "error",
        }
        unset = [word for name in os.environ if name.startswith("MLFLASH_") for word in ("--unset", name)]
        return ["env", *unset, *(f"{name}={value}" for name, value in environment.items())]


class Job(Launch):
    def __init__(self, nodes: Nodes, command: list[str], out: Path):
        self._nodes = nodes
        super().__init__(command, {**os.environ}, out)

    def pids(self) -> dict[int, int]:
        raise AssertionError("ranks know the numbers of their own node only: on this machine they are other processes")

    def ranks_on(self, host: str) -> list[int]:
        """Process numbers (of the machine) of the ranks on a node."""
        return self._nodes.running(host, str(WORKER))

    def wait_for_no_rank(self, hosts: Sequence[str]) -> None:
        """Wait until all ranks on some hosts have ended by themselves, whatever mpiexec does."""

        def late() -> str:
            self.kill()
            return f"the end of all ranks\n{self._text()}"

        until(lambda: not any(self.ranks_on(host) for host in hosts), late)

    def kill(self) -> None:
        """Kill everything that this launch started, on all nodes."""
        self._nodes.stop_all()
        signal_group(self._process, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        harness.live.discard(self)

    def wait(self, timeout: float = PATIENCE_S) -> Result:
        """Wait for the end; a job that hangs is killed and fails the test."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job still ran after {timeout} s:\n{self._text()}") from None
        self.wait_for_no_rank(self._nodes.names)  # mpiexec may be gone before its ranks are
        self.kill()
        return self.result()

    def result(self) -> Result:
        """What is known of a job that has ended."""
        return Result(self._process.returncode, self._text(), self.records())
