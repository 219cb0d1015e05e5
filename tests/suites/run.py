"""Run the checkpoint tests of other projects, with their own parts and with mlflash's in the place of these.

Usage: python -m suites.run --src DIR [SUITE ...]

DIR holds checkouts, each named as its project, or so with a dash and the version (pytorch-2.13.0). What the tests print
is in DIR/results/SUITE-own/log and SUITE-ours/log. Prints one table, and fails where something is not as expected.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import SUPPORT, TESTS, own_memory

from . import verdict
from .suite import Suite

HERE = Path(__file__).parent
NAMES = ("nvrx", "megatron", "pytorch", "trainer", "trainer_behind")


def run(suite: Suite, checkout: Path, results: Path, parts: str) -> verdict.Outcomes:
    """Run a suite in its checkout, with "ours" or "own" parts; the folder of results gets a log, too."""
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    with own_memory() as memory, (results / "log").open("w") as out:
        paths = [*(path for pattern in suite.paths for path in glob.glob(str(checkout / pattern))), SUPPORT, TESTS]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "SLURM", "MLFLASH"))}
        own = {
            "SUITE": suite.name, "SUITE_PARTS": parts, "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1", "MLFLASH_MEMORY": str(memory), "OUT": f"{memory}/", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(suite.ranks), "--module"]
        command = [sys.executable, "-m", *(launcher if suite.ranks else ()), "suites.session", str(results),
                   f"--rootdir={checkout}", "--override-ini=addopts=", "-p", "no:cacheprovider", "-r", "fE",
                   *suite.arguments(checkout)]  # fmt: skip
        running = subprocess.Popen(command, cwd=checkout, env=kept | own | suite.variables, stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            running.wait(suite.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{suite.title}: ended after {suite.limit_s:.0f} s")
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        return verdict.read_outcomes(results)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=NAMES)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended, too
    rows, absent = [], []
    for name in given.names:
        suite: Suite = importlib.import_module(f"suites.{name}").SUITE
        checkout = suite.find(given.src.resolve())
        if checkout is None:
            absent.append(f"not run: {suite.title}: there is no {suite.checkout} in {given.src}")
            continue
        results = given.src.resolve() / "results"
        own, ours = (run(suite, checkout, results / f"{name}-{parts}", parts) for parts in ("own", "ours"))
        expected = verdict.read_expected(HERE / f"{name}.txt")
        rows.append(verdict.Row(suite.title, suite.version(checkout), own, ours, expected))
    print(verdict.table(rows), *absent, sep="\n")
    for row in rows:
        reasons = [f"{count} x {why}" for why, count in row.reasons.items()]
        print(f"\n{row.title} {row.version}", *reasons, *row.wrong, sep="\n  ")
    return int(not rows or any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
