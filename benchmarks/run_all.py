"""Runs every benchmark, one after the other, and writes benchmarks/RESULTS.md.

    python benchmarks/run_all.py [--only NAME ...] [--quick] [--out FILE]

Each question is a separate program (benchmarks/NAME/run.py, or peers/recovery.py) with its own time limit. Its numbers
are kept in benchmarks/results, which is not under version control. RESULTS.md has the newest numbers of all questions,
so you can do a long run in parts. --only without names runs nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.launch import HOME, run_until
from bench.results import Result, read, report

ORDER = ("save", "profile", "sizes", "restore", "startup", "training", "walltime", "gpu", "dcp", "megatron",
         "own_files", "parity", "drain", "transport", "peers", "recovery", "scale")  # fmt: skip
PROGRAMS = {"recovery": HOME / "peers" / "recovery.py"}  # of a question without a folder of its own
END_S = 20.0  # between SIGTERM and SIGKILL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=ORDER, metavar="NAME", help=f"run only some of {', '.join(ORDER)}")
    parser.add_argument(
        "--quick", action="store_true", help="only check that everything works; do not write RESULTS.md"
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="limit of each question, in seconds")
    parser.add_argument("--out", type=Path, help="write this file instead of benchmarks/RESULTS.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # also ends the question that is running
    start_s, failed = time.monotonic(), dict[str, str]()
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) if args.quick else HOME / "results"
        for name in ORDER if args.only is None else args.only:
            if why := run(name, kept / f"{name}.json", args.quick, args.limit_s):
                failed[name] = why
        out = args.out or (None if args.quick else HOME / "RESULTS.md")
        if out is not None:
            results = {name: newest(name, kept) for name in ORDER}
            missing = {name: failed.get(name, "not run") for name, result in results.items() if result is None}
            out.write_text(report({name: of for name, of in results.items() if of is not None}, missing, args.quick))
    print(f"{time.monotonic() - start_s:.0f} s", *(f"{name}: {why}" for name, why in failed.items()), sep="\n")
    return 1 if failed else 0


def run(name: str, file: Path, quick: bool, limit_s: float) -> str:
    """Run a question. Return what went wrong, or ""."""
    print(f"--- {name}", flush=True)
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    start_s = time.monotonic()
    program = PROGRAMS.get(name, HOME / name / "run.py")
    command = [sys.executable, str(program), "--json", str(file), "--timeout-s", str(0.9 * limit_s)]
    why = run_until([*command, *["--quick"] * quick], limit_s, END_S)
    print(f"--- {name}: {time.monotonic() - start_s:.0f} s {why}", flush=True)
    return why


def newest(name: str, kept: Path) -> Result | None:
    """Return the results of this machine, or those of another one if this machine lacks what the question needs."""
    here, elsewhere = kept / f"{name}.json", HOME / name / "measured.json"
    result = read(here) if here.exists() else None
    if (result is None or "status" in result.header) and elsewhere.exists():
        return read(elsewhere)
    return result


if __name__ == "__main__":
    sys.exit(main())
