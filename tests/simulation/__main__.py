"""Simulate histories of a job, by seeds.

    python tests/simulation 0:1000                     run these seeds on all cores; print what fails
    python tests/simulation 17 --trace                 run one, and print everything that happens in it
    python tests/simulation 0:99,scheme=copy,special=drain+lazy,meets=launcher 6,special=kept

For each seed that fails it prints a command that runs it again, with no more faults than are needed.
"""

from __future__ import annotations

import argparse
import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same in each run
    os.environ.update(PYTHONHASHSEED="0", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

import machine

machine.install()

import runner  # noqa: E402
from faults import parse_seeds  # noqa: E402
from scheduler import NEVER  # noqa: E402

from mlflash.crash_points import POINTS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="+", help="FIRST[:AFTER_LAST][,FIELD=VALUE...], with fields of faults.Setting")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="seeds that run side by side")
    parser.add_argument("--minutes", type=float, default=NEVER, help="begin no seed after so many")
    parser.add_argument("--until", type=float, default=NEVER, metavar="POINTS", help="no fault after so many points")
    parser.add_argument("--trace", action="store_true", help="print each event")
    parser.add_argument("--digests", action="store_true", help="print a digest of the trace of each seed")
    args = parser.parse_args()
    summary, end = runner.Summary(), runner.now() + 60 * args.minutes
    runner.warm_up()
    for word in args.seeds:
        numbers, fixed = parse_seeds(word)
        makes = runner.seeds(numbers, fixed, args.until, args.trace)
        for result in runner.run_all(makes, args.jobs, end):
            summary.add(result)
            if args.digests:
                print(f"digest of {result.get('seed')}: {result.get('digest')}")
            if args.trace:
                print(result.get("trace"))
            if result["problems"]:
                _print_failure(result, word.partition(",")[2], fixed)
    print(f"{summary.seeds} seeds, {len(summary.failed)} failed, {summary.cpu_s:.0f} s of CPU: "
          f"{60 * summary.seeds / max(1e-9, summary.cpu_s):.0f} seeds per CPU minute, "
          f"{summary.points / max(1, summary.seeds):.0f} scheduling points each")  # fmt: skip
    print("outcomes:", ", ".join(f"{name} {count}" for name, count in summary.outcomes.most_common()))
    print(f"crash points: {len(summary.reached)} of {len(POINTS)}; never: "
          f"{', '.join(point for point in POINTS if point not in summary.reached) or 'none'}")  # fmt: skip
    return int(bool(summary.failed))


def _print_failure(result: runner.Result, fields: str, fixed: dict[str, object]) -> None:
    until = runner.shortest(result, fixed) if "points" in result else 0
    seed = f"{result.get('seed')}{',' if fields else ''}{fields}"
    print(f"--- seed {seed}: {result.get('setting')}", *result["problems"][:4], sep="\n")
    print(f"again: python tests/simulation {seed} --until {until} --trace", flush=True)


if __name__ == "__main__":
    sys.exit(main())
