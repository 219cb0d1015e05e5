"""Run a test again and again beside a busy loop on each core: one that depends on how busy the machine is fails here.

Usage: shake.py [--times 20] [--ranks N] BIN TEST [PYTEST ARGUMENTS...]   where BIN holds the programs of an environment
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_LIMIT_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, help="of mpiexec, for tests that run on each of several ranks")
    parser.add_argument("bin", type=Path)
    parser.add_argument("test", nargs="+")
    args, more = parser.parse_known_args()
    command = [str(args.bin / "pytest"), "-q", *args.test, *more]
    if args.ranks:
        command = [str(args.bin / "mpiexec"), "-n", str(args.ranks), str(args.bin / "python"), "-m", "mpi4py", *command,
                   "--only-mpi"]  # fmt: skip
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the loops are ended, too
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for number in range(1, args.times + 1):
            start = time.monotonic()
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S,
                                  check=False)  # fmt: skip
            if done.returncode != 0:
                print(f"{done.stdout}{done.stderr}\nrun {number} of {args.times} failed")
                return 1
            last = done.stdout.rstrip().rpartition("\n")[2]
            print(f"{number} of {args.times}: {time.monotonic() - start:.0f} s: {last}", flush=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
