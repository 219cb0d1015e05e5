"""Time the ways of MPI to send a slot to another node: on one host, between nodes, beside a busy main thread.

    python benchmarks/transport/run.py [--mib 64] [--chunk-mib 4] [--repetitions 7] [--main idle] [--place "one host"]
                                       [--way "Isend + Irecv"] [--quick] [--json FILE] [--plot FILE]

Both ranks send to each other at once, checksums at both ends. Two nodes are namespaces (as root, on Linux). It takes
the MPI of this Python environment: run it in one of each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from computing import IDLE, MAINS, PYTHON  # noqa: E402
from places import Launch, places  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from mlflash import __version__  # noqa: E402

WAYS = ("Put + flush", "Rput", "Rput, pushed", "Put + unlock", "PSCW", "fence", "Isend + Irecv",
        "mlflash, p2p", "mlflash, rma")  # fmt: skip
QUICK_WAYS = ("Rput, pushed", "Isend + Irecv")
START_S = 60.0  # a launch with its imports
YARDSTICK = "memcpy + Sendrecv"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="MiB per rank and direction")
    parser.add_argument("--chunk-mib", type=int, action="append", help="MiB per transfer; several times for several")
    parser.add_argument("--repetitions", type=int, default=7, help="how often; the median counts")
    parser.add_argument("--deadline-s", type=float, default=12.0, help="of one exchange: longer is never")
    parser.add_argument("--main", action="append", choices=MAINS, help="what the main thread does; all if not given")
    parser.add_argument("--place", action="append", help="where; all if not given")
    parser.add_argument("--way", action="append", choices=WAYS, help="how; all if not given")
    parser.add_argument("--quick", action="store_true", help="small and few: see whether it works, in under 30 s")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw the table to this file")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 8, 2
        args.main, args.place = args.main or [IDLE, PYTHON], args.place or ["one host"]
        args.way = args.way or QUICK_WAYS
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    wrong: list[str] = []
    for place, open_place in places().items():
        if args.place and place not in args.place:
            continue
        with open_place() as launch:
            for chunk_mib in args.chunk_mib or [4]:
                for main_does in args.main or MAINS:
                    found, ended = sweep(launch, args, main_does, chunk_mib, header)
                    rows += [{**row, "case": place, "column": main_does, "chunk MiB": chunk_mib} for row in found]
                    wrong += [f"{place}, main {main_does}: {one}" for one in ended]
    header |= {"cpus": os.cpu_count(), "load average before": load, "load average after": os.getloadavg()[0],
               "mlflash": __version__, "python": platform.python_version(), "MiB per rank": args.mib,
               "repetitions": args.repetitions, "deadline, s": args.deadline_s}  # fmt: skip
    show(header, rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    if args.plot is not None:
        from plot import draw

        draw(header, rows, args.plot)
    for one in wrong:
        print(f"transport: {one}", file=sys.stderr)
    return 1 if wrong or not rows else 0


def sweep(
    launch: Launch, args: argparse.Namespace, main_does: str, chunk_mib: int, header: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time all ways beside one kind of main thread; a way that does not end costs a launch, not those after it.

    Returns:
        Rows, and what went wrong.
    """
    left = list(args.way or WAYS)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    while left:
        arguments = [args.mib << 20, chunk_mib << 20, args.repetitions, main_does, args.deadline_s, "|".join(left)]
        timeout_s = START_S + len(left) * (args.repetitions + 2) * args.deadline_s / 2
        ended, lines = launch(HERE / "ranks.py", list(map(str, arguments)), timeout_s)
        header |= lines[0] if lines else {}
        found = lines[1:]
        rows += found
        left = left[len(found) :]
        if found and found[-1].get("never"):
            continue
        if left:
            wrong.append(f"{left[0]}: {ended or 'wrote nothing'}")
            rows.append({"what": left.pop(0), "failed": True})
    return rows, wrong


def show(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)
    for place, chunk_mib in dict.fromkeys((row["case"], row["chunk MiB"]) for row in rows):
        here = [row for row in rows if (row["case"], row["chunk MiB"]) == (place, chunk_mib)]
        mains = list(dict.fromkeys(row["column"] for row in here))
        table = Table("main thread:", *mains, title=f"{place}, chunks of {chunk_mib} MiB: seconds / ({YARDSTICK}) "
                      "\\[quartiles], / (memcpy + Put); what the main thread keeps of its speed")  # fmt: skip
        for what in dict.fromkeys(row["what"] for row in here):
            cells = {row["column"]: cell(row) for row in here if row["what"] == what}
            table.add_row(what, *(cells.get(name, "") for name in mains))
        console.print(table)


def cell(row: dict[str, Any]) -> str:
    """What the table says of one way."""
    if row.get("failed"):
        return "failed"
    if row.get("never"):
        return f"never ({row['seconds']:g} s)"
    low, high = row["spread"][YARDSTICK]
    kept = f"; {row['kept']:.2f}" if row["kept"] is not None else ""
    text = f"{row['over'][YARDSTICK]:.2f} \\[{low:.2f}, {high:.2f}], {row['over']['memcpy + Put']:.2f}{kept}"
    return text + ("" if len(row["samples"]) > 1 else " (once)")


if __name__ == "__main__":
    sys.exit(main())
