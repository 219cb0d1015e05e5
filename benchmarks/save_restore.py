"""How long mlflash's save and restore take, as ratios to a memcpy and a raw MPI Put of the same bytes.

    python benchmarks/save_restore.py [--mib 256] [--repetitions 9] [--quick] [--json FILE]

Starts itself under mpiexec on two ranks of this machine, each an emulated node of its own; cases.py holds
what they do. Seconds depend on the machine and its load, ratios little: they are what the aims are about.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from launch import keep, launch
from rich.console import Console
from rich.table import Table

from mlflash import __version__

CASES = Path(__file__).with_name("cases.py")
QUICK_MIB, QUICK_REPETITIONS = 32, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensors per rank, a multiple of 8")
    parser.add_argument("--repetitions", type=int, default=9, help="how often; the median counts")
    parser.add_argument("--timeout-s", type=float, default=600, help="the ranks are killed after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small and few: see whether it works, in under 30 s")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if args.mib < 8 or args.mib % 8:
        parser.error("--mib must be a multiple of 8")
    if args.quick:
        args.mib, args.repetitions = QUICK_MIB, QUICK_REPETITIONS
    before = os.getloadavg()
    arguments = [str(args.mib << 20), str(args.repetitions)]
    ended, lines = launch(2, CASES, arguments, args.timeout_s)
    header = {
        "mpi": lines[0]["mpi"] if lines else "unknown",
        "cpus": os.cpu_count(),
        "load average before": before[0],
        "load average after": os.getloadavg()[0],
        "mlflash": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bytes per rank": args.mib << 20,
        "repetitions": args.repetitions,
    }
    show(header, lines[1:])
    return keep(args.json, header, lines[1:], ended)


def show(header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)
    table = Table("what", "seconds", "/ memcpy", "/ (memcpy + Put)", "aim", "reached")
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in rows:
        over, aim = row["over"], row["aim"]
        numbers = [f"{row['seconds']:.4f}", f"{over['memcpy']:.2f}", f"{over['memcpy + Put']:.2f}"]
        if aim is None:
            table.add_row(row["what"], *numbers, "", "")
            continue
        of, most = aim
        good = over[of] <= most
        reached = f"[{'green' if good else 'red'}]{'yes' if good else 'no'}, {over[of]:.2f}"
        table.add_row(row["what"], *numbers, f"≤ {most} of {of}", reached)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
