"""What local checkpoints of Megatron cost training: LocalCheckpoints beside NVRx's manager, both with copies.

    python benchmarks/megatron.py [--ranks 2] [--mib 256] [--rounds 5] [--quick] [--json FILE]

Starts itself under mpiexec, each rank an emulated node of its own; megatron_cases.py holds what they do. NVRx's manager
writes to /dev/shm and replicates to the other rank (clique of 2). Its wheel is for one version of Python only, but its
checkpointing is not: what `pip download --no-deps nvidia-resiliency-ext` gave, unpacked and on PYTHONPATH, will do.
Without it that part is left out. What is loaded is compared bit by bit with what was saved.

    stall       until save, and the queue that its request goes to, return and training goes on
    total       until the request is finalized
    load        find_latest and load
    after loss  the same, after rank 0's node was lost
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

CASES = Path(__file__).with_name("megatron_cases.py")
COLUMNS = ("stall", "total", "load", "after loss")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="an even number")
    parser.add_argument("--mib", type=int, default=256, help="MiB of each rank")
    parser.add_argument("--tensors", type=int, nargs="+", default=[64, 1024], help="how many tensors that is")
    parser.add_argument("--rounds", type=int, default=5, help="how often, after one to warm up; the median counts")
    parser.add_argument("--timeout-s", type=float, default=900, help="the ranks are killed after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small and few: see whether it works, in under 30 s")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if args.ranks < 2 or args.ranks % 2:
        parser.error("--ranks must be an even number")
    if args.quick:
        args.mib, args.tensors, args.rounds = 8, [16], 1
    before = os.getloadavg()[0]
    arguments = [str(args.mib << 20), str(args.rounds), *map(str, args.tensors)]
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
        table = Table("what", *(f"{name}, s" for name in COLUMNS), title=f"{case}: median seconds, and / memcpy / NVRx")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in of_case:
            seconds, memcpy, nvrx = row["seconds"], row["over memcpy"], row["over NVRx"]
            cells = [
                f"{seconds[c]:.4f} {memcpy[c]:6.2f}x" + (f" {nvrx[c]:5.2f}x" if nvrx else "") if c in seconds else ""
                for c in COLUMNS
            ]
            table.add_row(row["what"], *cells)
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
