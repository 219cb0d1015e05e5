"""Where the two ranks run: on this host, or on two nodes made of namespaces, each with a network of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.launch import HOME, launch

from mlflash.demo.launch import find_mpiexec

sys.path.insert(0, str(HOME.parent / "tests"))  # the project's model of several nodes

from cluster.nodes import HEAD, TOOLS, Nodes  # noqa: E402

KILL_S = 10.0  # after SIGTERM
HOSTS = ("host1", "host2")
# As in tests/cluster: between nodes TCP over their cables; UCX might find a way on this machine that needs no cable.
NETMODS = {
    "mpich": {
        "ucx": {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"},
        "ofi": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
    },
    "openmpi": {"ob1": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_osc": "^ucx"}},
}
Lines = list[dict[str, Any]]
Launch = Callable[[Path, list[str], float], tuple[str, Lines]]
"""Runs a script with arguments (after a file for lines of JSON and a directory in memory) on two ranks, at most so
many seconds; returns what went wrong ("": nothing) and the lines."""


def places() -> dict[str, Callable[[], contextlib.AbstractContextManager[Launch]]]:
    """The places that there are on this machine, with this MPI, by name."""
    found: dict[str, Callable[[], contextlib.AbstractContextManager[Launch]]] = {"one host": _one_host}
    if os.geteuid() == 0 and all(shutil.which(tool) for tool in TOOLS):
        for name, environment in NETMODS[find_mpiexec()[1]].items():
            found[f"two nodes, {name}"] = _two_nodes_over(environment)
    return found


def _one_host() -> contextlib.AbstractContextManager[Launch]:
    return contextlib.nullcontext(lambda script, arguments, timeout_s: launch(2, script, arguments, timeout_s))


def _two_nodes_over(environment: Mapping[str, str]) -> Callable[[], contextlib.AbstractContextManager[Launch]]:
    @contextlib.contextmanager
    def two_nodes() -> Iterator[Launch]:
        with Nodes(HOSTS, shm="4g") as nodes:

            def launch_on_nodes(script: Path, arguments: list[str], timeout_s: float) -> tuple[str, Lines]:
                out = nodes.path / "out.jsonl"
                out.unlink(missing_ok=True)
                path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
                env = {**environment, "PYTHONPATH": path, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
                assignments = [f"{name}={value}" for name, value in env.items()]
                argv = [sys.executable, "-m", "mpi4py", str(script), str(out), "/dev/shm", *arguments]
                command = nodes.command(HEAD, [*_mpiexec(nodes), "env", *assignments, *argv])
                try:
                    return _run(command, timeout_s), _lines(out)
                finally:
                    nodes.stop_all()
                    for name in HOSTS:
                        nodes.run(name, "find", "/dev/shm", "-mindepth", "1", "-delete")

            yield launch_on_nodes

    return two_nodes


def _mpiexec(nodes: Nodes) -> list[str]:
    path, vendor = find_mpiexec()
    shell, hosts = str(nodes.shell), ",".join(f"{host}:1" for host in HOSTS)
    if vendor == "openmpi":
        return [path, "--allow-run-as-root", "--prtemca", "plm_ssh_agent", shell, "--host", hosts,
                "--bind-to", "none", "-n", "2"]  # fmt: skip
    return [path, "-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts, "-n", "2"]


def _run(command: list[str], timeout_s: float) -> str:
    nothing = subprocess.DEVNULL
    running = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE,
                               start_new_session=True, text=True, errors="replace")  # fmt: skip
    try:
        _, said = running.communicate(timeout=timeout_s)
        return "" if running.returncode == 0 else f"exit status {running.returncode}: {said[-2000:]}"
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:g} s"
    finally:
        if running.poll() is None:
            running.terminate()  # mpiexec hands it on to ranks of other sessions
            try:
                running.wait(KILL_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait(KILL_S)


def _lines(out: Path) -> Lines:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
