"""How planning, agreement, inventory and restore grow with the job, and what that means for 1,000 to 100,000 GPUs.

    python benchmarks/scale/run.py [--ranks N ...] [--samples 20000] [--seed 1] [--quick] [--json FILE] [--plot FILE]

Without MPI: it is the code that every rank runs, on the tables and messages of 1,024 to 131,072 ranks, 8 on a node; and
a model of machines of which the parameters are measured here or published. Ends with 1 where numbers contradict each
other or an aim is missed. Formulas, sources and results are in README.md beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from scale import agreement, forecast, kernels, planning, show
from scale.parameters import Node

from mlflash import __version__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=planning.RANKS, help="sizes of the job, multiples of 8")
    parser.add_argument("--samples", type=int, default=20_000, help="random losses")
    parser.add_argument("--seed", type=int, default=1, help="of the random losses")
    parser.add_argument("--quick", action="store_true", help="1,024 and 16,384 ranks, few losses: 20 seconds")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw to FILE.svg, FILE-model.svg and FILE-waste.svg (matplotlib)")
    args = parser.parse_args()
    if any(ranks < 128 or ranks % 64 for ranks in args.ranks):
        parser.error("--ranks must be multiples of 64, at least 128")
    if args.quick:
        args.ranks, args.samples = (1024, 16_384), 2000
    logging.getLogger("mlflash").setLevel(logging.ERROR)
    header = about(args)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)

    start = time.monotonic()
    plans = [planning.measure(ranks, scheme, args.samples, args.seed)
             for ranks in args.ranks for scheme in planning.SCHEMES]  # fmt: skip
    show.plans(console, plans)
    sizes = [ranks for ranks in args.ranks if not args.quick or ranks == args.ranks[0]]
    measured = [agreement.measure(ranks, *job) for ranks in sizes for job in agreement.JOBS]
    jobs = [row for row in measured if row is not None]
    show.jobs(console, jobs)
    rates = kernels.measure()
    show.rates(console, rates)
    points = list(forecast.points(Node(), gpus=forecast.FEW if args.quick else forecast.GPUS))
    show.points(console, points)

    header |= {"load average after": os.getloadavg()[0], "seconds": round(time.monotonic() - start, 1)}
    console.print(f"load average after: {header['load average after']:.2f}; {header['seconds']} s", highlight=False)
    if args.json is not None:
        rows = [*({"what": "rank", **vars(row)} for row in plans), *({"what": "job", **vars(row)} for row in jobs),
                *({"what": "core", "name": name, "Bps": rate} for name, rate in rates.items()),
                *({"what": "model", **dataclasses.asdict(point)} for point in points)]  # fmt: skip
        args.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    if args.plot is not None:
        draw(args.plot, plans, jobs, points)
    rows_of_both: list[planning.Row | agreement.Row] = [*plans, *jobs]
    wrong = [row for row in rows_of_both if row.wrong]
    for row in wrong:
        print(f"scale: {row.ranks:,} ranks, {row.scheme}: {row.wrong}", file=sys.stderr)
    return int(bool(wrong))


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Say on what and with what this runs."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    return {"cpus": os.cpu_count(), "load average before": os.getloadavg()[0], "mlflash": __version__,
            "commit": commit or "unknown", "python": platform.python_version(), "numpy": np.__version__,
            "samples": args.samples, "seed": args.seed}  # fmt: skip


def draw(path: Path, plans: list[planning.Row], jobs: list[agreement.Row], points: list[forecast.Point]) -> None:
    """Draw three plots: to the path, and to two beside it."""
    from scale import plots

    plots.draw_ranks(path, plans, jobs)
    plots.draw_model(path.with_stem(f"{path.stem}-model"), points)
    plots.draw_waste(path.with_stem(f"{path.stem}-waste"), points)


if __name__ == "__main__":
    sys.exit(main())
