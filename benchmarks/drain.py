"""How fast checkpoints get from memory to a disk, beside dd and PyTorch's writer; and what training notices of it.

    python benchmarks/drain.py [--disk DIR] [--ranks 2] [--mib 256] [--rounds 3] [--quick] [--json FILE]

Starts itself under mpiexec, each rank an emulated node of its own; drain_cases.py holds what they do. All write the
same number of bytes to the same disk, and wait until the disk has them. dd writes zeros, which some disks take faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from launch import keep, launch
from rich.console import Console
from rich.table import Table

CASES = Path(__file__).with_name("drain_cases.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="MiB of each rank, in 64 tensors")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--step-ms", type=float, default=50, help="of training")
    parser.add_argument("--timeout-s", type=float, default=900, help="the ranks are killed after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small: see whether it works")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.rounds = 16, 1
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="mlflash-bench-") as disk:
        arguments = [disk, "64", str(args.mib * (1 << 20) // 64), str(args.rounds), str(args.step_ms / 1e3)]
        ended, rows = launch(args.ranks, CASES, arguments, args.timeout_s)
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table("what", "seconds", "GB/s", title=f"{args.ranks} ranks of {args.mib} MiB, to {args.disk}")
    for row in (row for row in rows if "seconds" in row):
        table.add_row(row["what"], f"{row['seconds']:.3f}", f"{row['GB/s']:.2f}")
    console.print(table)
    table = Table("what", "without, ms", "with, ms", "slower by", title="steps of training, mean")
    for row in (row for row in rows if "slowdown" in row):
        table.add_row(row["what"], f"{row['without, ms']:.1f}", f"{row['with, ms']:.1f}", f"{row['slowdown']:.1%}")
    console.print(table)
    header = {"cpus": os.cpu_count(), "load": os.getloadavg()[0],
              **{name: str(value) for name, value in vars(args).items()}}  # fmt: skip
    return keep(args.json, header, rows, ended)


if __name__ == "__main__":
    sys.exit(main())
