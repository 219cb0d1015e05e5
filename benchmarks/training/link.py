"""Two nodes made of namespaces, and a slow cable between them that training and courier share."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.launch import HOME
from bench.results import keep, machine
from bench.table import show

from mlflash.demo.launch import find_mpiexec

sys.path.insert(0, str(HOME.parent / "tests"))  # the project's model of several nodes

from cluster.jobs import NETMODS, NETMODS_HERE  # noqa: E402
from cluster.nodes import HEAD, TOOLS, Nodes  # noqa: E402

HOSTS = ("host1", "host2")
RANKS = Path(__file__).with_name("link_ranks.py")
END_S = 10.0  # after SIGTERM
NO_ROOT = "--link makes nodes of namespaces, and only root may: run it as root, on Linux"


def run(args: argparse.Namespace) -> int:
    """Train across the cable, print what was found; gives the exit status."""
    if os.geteuid() != 0:
        print(NO_ROOT, file=sys.stderr)
        return 1
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        print(f"--link needs {', '.join(missing)} (packages hostname, iproute2, mount, util-linux)", file=sys.stderr)
        return 1
    load = os.getloadavg()[0]
    ended, lines = across(args.mbit, ["quick" if args.quick else "whole"], args.timeout_s)
    rows: list[Any] = [line for line in lines if "what" in line]
    header = {**machine(), "Mbit/s": args.mbit, "load average before": load, "load average after": os.getloadavg()[0]}
    show(header, rows)
    if args.json is not None:
        keep(args.json, header, rows)
    if ended:
        print(f"training --link: {ended}", file=sys.stderr)
    return 1 if ended or not rows else 0


def across(mbit: int, arguments: list[str], timeout_s: float) -> tuple[str, list[dict[str, Any]]]:
    """Run two ranks, one at each end of a cable of so many Mbit/s; gives what went wrong, and their lines."""
    with Nodes(HOSTS, shm="2g") as nodes:
        for host in HOSTS:
            nodes.limit_rate(host, mbit)
        out = nodes.path / "out.jsonl"
        path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
        env = {**NETMODS[NETMODS_HERE[0]], "PYTHONPATH": path, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1",
               "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
        argv = [sys.executable, "-m", "mpi4py", str(RANKS), str(out), "/dev/shm", *arguments]
        assignments = [f"{name}={value}" for name, value in env.items()]
        ended = _run(nodes.command(HEAD, [*_mpiexec(nodes), "env", *assignments, *argv]), {**os.environ}, timeout_s)
        nodes.stop_all()
        return ended, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _mpiexec(nodes: Nodes) -> list[str]:
    path, vendor = find_mpiexec()
    shell, hosts = str(nodes.shell), ",".join(f"{host}:1" for host in HOSTS)
    if vendor == "openmpi":
        return [path, "--allow-run-as-root", "--prtemca", "plm_ssh_agent", shell, "--host", hosts,
                "--bind-to", "none", "-n", "2"]  # fmt: skip
    return [path, "-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts, "-n", "2"]


def _run(command: list[str], env: Mapping[str, str], timeout_s: float) -> str:
    nothing = subprocess.DEVNULL
    running = subprocess.Popen(command, env=env, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE,
                               start_new_session=True, text=True, errors="replace")  # fmt: skip
    try:
        _, said = running.communicate(timeout=timeout_s)
        return "" if running.returncode == 0 else f"exit status {running.returncode}: {said[-2000:]}"
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:g} s"
    finally:
        if running.poll() is None:
            running.terminate()
            try:
                running.wait(END_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait(END_S)
