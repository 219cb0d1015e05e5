"""Runs every benchmark that has a folder, one after the other, and writes benchmarks/RESULTS.md.

    python benchmarks/run_all.py [--only NAME ...] [--quick] [--out FILE]

Each question is a separate program (benchmarks/NAME/run.py) with its own time limit. Its tables go to its README.md,
and its plot goes to plot.svg in its folder.

The numbers are kept in benchmarks/results, which is not under version control. With --only, the numbers of the other
questions come from there if they belong to the same commit. So you can do a long run in parts. --only without names
runs nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench.launch import HOME, run_until  # noqa: E402
from bench.report import report  # noqa: E402
from bench.results import KEPT, Result, commit, fill_readme, machine, read  # noqa: E402

FIRST = ("save", "sizes", "restore", "startup", "training", "walltime", "gpu", "dcp", "megatron", "own_files", "parity",
         "drain", "transport", "peers", "scale", "profile")  # fmt: skip
LIMIT_S, QUICK_LIMIT_S = 300.0, 200.0  # limits of a question; the limits of its ranks are shorter
END_S = 20.0  # between SIGTERM and SIGKILL
# Questions that take minutes by themselves measure less here, so that all are done within a quarter of an hour.
LESS = {
    "transport": ["--main", "idle", "matmul", "--repetitions", "3", "--deadline-s", "3"],
    "walltime": ["--repetitions", "3", "--steps", "10"],
    "peers": ["--shapes", "8 MiB tensors", "1024 tensors", "--mib", "128", "--repetitions", "3"],
    "scale": ["--ranks", "1024", "16384", "--samples", "5000"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="run only these questions; default: all")
    parser.add_argument(
        "--quick", action="store_true", help="only check that everything works; do not write RESULTS.md"
    )
    parser.add_argument("--out", type=Path, help="write this file instead of benchmarks/RESULTS.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # also ends the question that is running
    known = questions()
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    out = args.out or (None if args.quick else HOME / "RESULTS.md")
    if args.quick and out is not None and out.resolve() == HOME / "RESULTS.md":
        parser.error("a quick run must not be kept as RESULTS.md: use --out")
    chosen = known if args.only is None else args.only
    before, start, status = os.getloadavg()[0], time.monotonic(), 0
    results: dict[str, Result] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if args.quick else KEPT
        for name in known:
            file = folder / f"{name}.json"
            if name in chosen:
                file.unlink(missing_ok=True)
                why = run(name, file, args.quick)
                status |= bool(why)
                missing |= {name: why} if why else {}
            if name in chosen or is_current(file):
                results |= {name: here_or_elsewhere(name, file)} if file.exists() else {}
            if name not in results:
                missing.setdefault(name, "not run")
    header = {**machine(), "load average before": before, "load average after": os.getloadavg()[0],
              "seconds": round(sum(result.header.get("seconds", 0) for result in results.values()))}  # fmt: skip
    print(f"{time.monotonic() - start:.0f} s")
    for name, why in missing.items():
        print(f"{name}: {why}")
    if out is not None:
        out.write_text(report(header, results, missing, args.quick))
    if args.quick:
        print("A quick run: its numbers must not be kept as RESULTS.md.")
    return status


def questions() -> list[str]:
    """Return the names of the folders that have a run.py, in the order of FIRST."""
    found = sorted(path.parent.name for path in HOME.glob("*/run.py"))
    return sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def run(name: str, file: Path, quick: bool) -> str:
    """Run a question. Return what went wrong, or "". The results up to an error are kept."""
    file.parent.mkdir(exist_ok=True)
    script, plot = HOME / name / "run.py", HOME / name / "plot.svg"
    arguments = ["--json", str(file), *(["--quick"] if quick else ["--plot", str(plot), *LESS.get(name, ())])]
    print(f"--- {name}", flush=True)
    start, limit_s = time.monotonic(), QUICK_LIMIT_S if quick else LIMIT_S
    why = run_until([sys.executable, str(script), *arguments], limit_s, END_S)
    why = f"run.py {why}" if why else ""
    print(f"--- {name}: {time.monotonic() - start:.0f} s {why}", flush=True)
    readme = script.with_name("README.md")
    if file.exists() and readme.exists() and not quick and not why:
        fill_readme(readme, here_or_elsewhere(name, file))
    return why


def here_or_elsewhere(name: str, file: Path) -> Result:
    """Return the results. If this machine lacks what the question needs, return the kept ones of another machine."""
    found, elsewhere = read(file), HOME / name / "measured.json"
    return read(elsewhere) if "status" in found.header and elsewhere.exists() else found


def is_current(file: Path) -> bool:
    """Return whether the kept results belong to the current commit."""
    now = commit()
    return file.exists() and bool(now) and not now.endswith("+") and read(file).header.get("commit") == now


if __name__ == "__main__":
    sys.exit(main())
