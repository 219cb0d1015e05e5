"""How fast parity is made and lost slots are rebuilt, beside a memcpy, a plain XOR loop and a raw exchange.

    python benchmarks/parity.py [--ranks 4] [--mib 64] [--repetitions 9] [--transport p2p] [--quick] [--json FILE]

Starts itself under mpiexec, each rank an emulated node of its own; parity_cases.py holds what they do. The time of a
scheme has the checksums of every block at both ends in it, those of the raw exchange and the XOR loop have none.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from launch import keep, launch
from rich.console import Console
from rich.table import Table

CASES = Path(__file__).with_name("parity_cases.py")
# Over what, and at most how much; and GB/s of all slots together, at least: LLNL's redset reaches 1.20 and 0.46.
AIMS = {"xor": ("raw exchange", 2.0, 2.40), "rs": ("xor", 1.5, 1.84)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="4 or more")
    parser.add_argument("--mib", type=int, default=64, help="MiB per rank")
    parser.add_argument("--repetitions", type=int, default=9, help="how often; the median counts")
    parser.add_argument("--transport", choices=("p2p", "rma"), default="p2p")
    parser.add_argument("--timeout-s", type=float, default=300, help="the ranks are killed after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small and few: see whether it works")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if args.ranks < 4:
        parser.error("--ranks must be 4 or more")
    if args.quick:
        args.mib, args.repetitions = 8, 3
    before = os.getloadavg()[0]
    arguments = [str(args.mib << 20), str(args.repetitions), args.transport]
    ended, lines = launch(args.ranks, CASES, arguments, args.timeout_s)
    header = {**(lines[0] if lines else {}), "cpus": os.cpu_count(), "load average before": before, **vars(args)}
    header.pop("json")
    show(header, lines[1:], args.ranks * args.mib << 20)
    return keep(args.json, header, lines[1:], ended)


def show(header: dict[str, Any], rows: list[dict[str, Any]], nbytes: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)
    seconds = {row["what"]: np.array(row["seconds"]) for row in rows}
    table = Table("what", "seconds", "GB/s", "/ memcpy", "/ raw exchange", "/ XOR", "aim", "reached")
    for column in table.columns[1:6]:
        column.justify = "right"
    xor = next((what for what in seconds if what.startswith("xor") and "rebuild" not in what), "")
    for what, samples in seconds.items():
        share = 1.0
        if what.endswith("rebuild"):  # only the bytes of the lost slots
            share = (1 if what.startswith("xor") else 2) / header["ranks"]
        speed = share * nbytes / np.median(samples) / 1e9
        over = {name: float(np.median(samples / seconds[of])) for name, of in
                (("memcpy", "memcpy"), ("raw exchange", "raw exchange"), ("xor", xor))}  # fmt: skip
        aim, reached = "", ""
        scheme = what.split(":")[0]
        if scheme in AIMS and "rebuild" not in what:
            of, most, least = AIMS[scheme]
            good = over[of] <= most and speed >= least
            aim = f"≤ {most} of {of}, ≥ {least:.2f} GB/s"
            reached = "[green]yes" if good else "[red]no"
        numbers = [f"{over[name]:.2f}" for name in ("memcpy", "raw exchange", "xor")]
        table.add_row(what, f"{np.median(samples):.4f}", f"{speed:.2f}", *numbers, aim, reached)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
