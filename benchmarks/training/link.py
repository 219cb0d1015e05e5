"""Makes two nodes from namespaces, with a slow cable between them that training and courier share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bench.launch import Lines
from bench.results import keep, machine
from bench.table import grids, show
from bench.two_nodes import HOSTS, NETWORKS, Nodes, launch_on, why_not_here

RANKS = Path(__file__).with_name("link_ranks.py")


def run(args: argparse.Namespace) -> int:
    """Train across the cable and print the results. Return the exit status."""
    if why := why_not_here():
        print(f"training --link: {why}", file=sys.stderr)
        return 1
    load = os.getloadavg()[0]
    ended, lines = across(args.mbit, ["quick" if args.quick else "whole"], args.timeout_s)
    rows: list[Any] = [line for line in lines if "what" in line]
    header = {**machine(), "Mbit/s": args.mbit, "load average before": load, "load average after": os.getloadavg()[0]}
    show(header, grids(rows))
    if args.json is not None:
        keep(args.json, header, rows)
    if ended:
        print(f"training --link: {ended}", file=sys.stderr)
    return 1 if ended or not rows else 0


def across(mbit: int, arguments: list[str], timeout_s: float) -> tuple[str, Lines]:
    """Run two ranks, one at each end of a cable of ``mbit`` Mbit/s. Return what went wrong, and their lines."""
    with Nodes(HOSTS, shm="2g") as nodes:
        for host in HOSTS:
            nodes.limit_rate(host, mbit)
        network = next(iter(NETWORKS.values()))
        return launch_on(nodes, RANKS, arguments, timeout_s, {**network, "GLOO_SOCKET_IFNAME": "eth0"})
