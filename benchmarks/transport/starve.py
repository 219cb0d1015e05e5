"""Shows why MPICH's Put on one host starves if the main thread is busy: a minimal case with one change at a time.

python benchmarks/transport/starve.py [--mib 8] [--main python] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench.results import keep  # noqa: E402
from bench.table import Grid, show  # noqa: E402
from computing import IDLE, MAINS, PYTHON  # noqa: E402
from places import places  # noqa: E402

START_S = 40.0
_CELL, _CELLS, _PACK = (f"MPIR_CVAR_{name}" for name in (
    "CH4_SHM_POSIX_IQUEUE_CELL_SIZE", "CH4_SHM_POSIX_IQUEUE_NUM_CELLS", "CH4_PACK_BUFFER_SIZE"))  # fmt: skip
PLAIN = {"window": "create", "push": "0", "nap_s": "1e-3", "switch_s": "0"}
CHANGES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "unchanged: window over a file, a Test each ms": ({}, {}),
    "MPI's own memory (Win.Allocate)": ({"window": "allocate"}, {}),
    "Isend, Irecv": ({"window": "none"}, {}),
    "the network instead of shared memory": ({}, {"MPIR_CVAR_NOLOCAL": "1"}),
    "cells of 16 KiB instead of 8": ({}, {_CELL: "16384"}),
    "cells of 64 KiB": ({}, {_CELL: "65536", _PACK: "65536"}),
    "cells of 1 MiB, 16 of them": ({}, {_CELL: "1048576", _PACK: "1048576", _CELLS: "16"}),
    "1024 cells of 8 KiB instead of 64": ({}, {_CELLS: "1024"}),
    "switch interval of the interpreter: 10 us": ({"switch_s": "1e-5"}, {}),
    "no sleep between tests": ({"nap_s": "0"}, {}),
    "Lock, Unlock of another window before each sleep": ({"push": "lock"}, {}),
    "16 Iprobes before each sleep": ({"push": "16"}, {}),
    "64 Iprobes before each sleep": ({"push": "64"}, {}),
    "256 Iprobes before each sleep": ({"push": "256"}, {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=8, help="MiB each way")
    parser.add_argument(
        "--deadline-s", type=float, default=20.0, help="limit of one exchange in seconds; a longer one counts as never"
    )
    parser.add_argument("--main", action="append", choices=MAINS, help="the work of the main thread")
    parser.add_argument("--quick", action="store_true", help="two cases in under 30 s, only to check that it works")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    mains = args.main or [IDLE, PYTHON]
    changes = {name: CHANGES[name] for name in list(CHANGES)[1:3]} if args.quick else CHANGES
    rows: list[dict[str, Any]] = []
    header: dict[str, Any] = {"cpus": os.cpu_count(), "load average before": os.getloadavg()[0], "MiB": args.mib}
    with places()["one host"]() as launch:
        for what, (changed, environment) in changes.items():
            for main_does in mains:
                how = PLAIN | changed
                arguments = [str(args.mib << 20), str(args.deadline_s), main_does, *how.values()]
                with mock.patch.dict(os.environ, environment):
                    ended, lines = launch(HERE / "starve_ranks.py", arguments, START_S + args.deadline_s)
                rows.append({"what": what, "column": main_does, "ended": ended, **(lines[0] if lines else {})})
    header["load average after"] = os.getloadavg()[0]
    lines_of = [[what, *(_cell(row) for row in rows if row["what"] == what)] for what in changes]
    show(header, [Grid(f"{args.mib} MiB each way: seconds, tests, KiB per test", ["", *mains], lines_of)])
    if args.json is not None:
        keep(args.json, header, rows)  # type: ignore[arg-type]  # these rows have their own form
    return 0 if all("seconds" in row for row in rows) else 1


def _cell(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return "failed"
    per_test = f"{row['polls']}, {row['arrived'] / 1024 / max(1, row['polls']):.1f}"
    if row["never"]:
        return f"never ({row['seconds']:.0f} s; {row['arrived'] >> 20} MiB arrived), {per_test}"
    return f"{row['seconds']:.3f}, {per_test}"


if __name__ == "__main__":
    sys.exit(main())
