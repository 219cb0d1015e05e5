"""Run the steps of the gate, or of all tests, and add up what their tests reported.

Usage, in tests/: python -m ci gate|full [--only STEP ...]
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time

from ci.lanes import REPORTS, Run
from ci.steps import FULL, GATE, of_torch
from ci.tally import MAY_SKIP, OTHER_RANKS, tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gate", "full"])
    parser.add_argument("--torch", nargs="*", default=(), metavar="VERSION", help="with these versions of PyTorch, too")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, in the environments that are there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs is ended, too
    known = GATE if args.what == "gate" else FULL
    known += tuple(step for version in args.torch for step in of_torch(version))
    steps = [step for step in known if not args.only or step.name in args.only]
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    start, run = time.monotonic(), Run(steps)
    run.all()
    print("\nThe steps, by the CPU seconds they took, and by the seconds of a clock:")
    for name, end in sorted(run.ended.items(), key=lambda item: -item[1].cpu_s):
        print(f"{end.cpu_s:7.0f} {end.wall_s:7.0f}  {name}{'' if end.passed else '  FAILED'}")
    print(f"{sum(end.cpu_s for end in run.ended.values()):7.0f} {time.monotonic() - start:7.0f}  all")
    uncounted = [step for step in steps if not step.has_report and step.name not in run.failed]
    may_skip = MAY_SKIP + OTHER_RANKS if args.what == "gate" else MAY_SKIP
    return tally(REPORTS, run.failed, len(uncounted), may_skip)


if __name__ == "__main__":
    sys.exit(main())
