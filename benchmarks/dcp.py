"""What PyTorch DCP costs training through mlflash and through files in /dev/shm, as multiples of a memcpy.

    python benchmarks/dcp.py [--ranks 2] [--mib 4] [--small 3000] [--rounds 5] [--quick] [--json FILE]

Starts itself under mpiexec, each rank an emulated node of its own; dcp_cases.py holds what they do. What is loaded is
compared bit by bit with what was saved.

    stall   until dcp.async_save returns and training goes on
    total   until its future has a result: the checkpoint is committed
    CPU     seconds of all threads of a rank, from the call of dcp.async_save to that result
    sync    dcp.save
    load    dcp.load
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from launch import keep, launch
from rich.console import Console
from rich.table import Table

CASES = Path(__file__).with_name("dcp_cases.py")
COLUMNS = ("stall", "total", "CPU", "sync", "load")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="2 or more")
    parser.add_argument("--large", type=int, default=64, help="how many large tensors")
    parser.add_argument("--mib", type=int, default=4, help="MiB of each large tensor on each rank")
    parser.add_argument("--small", type=int, default=3000, help="how many small tensors")
    parser.add_argument("--rounds", type=int, default=5, help="how often, after one to warm up; the median counts")
    parser.add_argument("--timeout-s", type=float, default=900, help="the ranks are killed after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small and few: see whether it works, in under 30 s")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be 2 or more")
    if args.quick:
        args.large, args.mib, args.small, args.rounds = 16, 1, 100, 1
    before = os.getloadavg()[0]
    arguments = [str(args.large), str(args.mib << 20), str(args.small), str(args.rounds)]
    ended, lines = launch(args.ranks, CASES, arguments, args.timeout_s)
    header = {
        **(lines[0] if lines else {}),
        "cpus": os.cpu_count(),
        "load average before": before,
        "load average after": os.getloadavg()[0],
        "torch": torch.__version__,
        **{name: value for name, value in vars(args).items() if name != "json"},
    }
    show(header, lines[1:])
    return keep(args.json, header, lines[1:], ended)


def show(header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)
    for case, of_case in groupby(rows, key=lambda row: row["case"]):
        table = Table("what", *(f"{name}, s" for name in COLUMNS), title=f"{case}: median seconds, and / memcpy")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in of_case:
            seconds, over = row["seconds"], row["over memcpy"]
            table.add_row(row["what"], *(f"{seconds[c]:.4f} {over[c]:6.2f}x" if c in seconds else "" for c in COLUMNS))
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
