"""Measures how long a program takes until its Checkpointer is ready, and compares this with NumPy and MPI_Init alone.

    python benchmarks/startup/run.py [--ranks 1 2 4] [--repetitions 9] [--quick] [--json FILE] [--plot FILE] [--readme]

It starts start.py again and again, each time as a new program. Several ranks start under mpiexec.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
from bench.aims import BARE_AND_A_BIT  # noqa: E402
from bench.launch import KILL_S, lines_of, run_until  # noqa: E402
from bench.plots import draw  # noqa: E402
from bench.question import begin, finish, parser_of  # noqa: E402
from bench.rows import Row, Samples, row  # noqa: E402

from mlflash.launcher.processes import mpiexec  # noqa: E402

START_PY = Path(__file__).with_name("start.py")
BARE = "import numpy, MPI_Init"
IMPORTS = "import numpy, mlflash"
KINDS = {"bare": BARE, "imports": IMPORTS, "thread": "Checkpointer, a thread", "process": "Checkpointer, a process"}
CALL = ": the call alone"
A_BIT_S = 0.15  # how much longer than a bare start a Checkpointer may take
WARM_UP = 1  # it writes the bytecode, which an installed package already has
PATIENCE_S = 60.0  # limit of one start


def main() -> int:
    args = arguments()
    begun = begin(args)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # otherwise its files in memory would stay
    rows: list[Row] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlflash-bench-") as memory:
        for ranks in args.ranks:
            samples, failed = measure(ranks, args.repetitions, Path(memory))
            wrong += failed
            rows += [] if failed else rows_of(ranks, samples)
    return finish(args, begun, {}, rows, wrong, lambda path: draw(path, rows, BARE))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=None, repetitions=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks of the programs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.repetitions = [1, 2], 2
    return args


def measure(ranks: int, repetitions: int, memory: Path) -> tuple[Samples, list[str]]:
    """Start all kinds of programs in turn. Return the seconds by name, and what went wrong."""
    rounds = []
    for number in range(WARM_UP + repetitions):
        seconds: dict[str, float] = {}
        for kind, name in KINDS.items():
            out = memory / f"{ranks}-{number}-{kind}"
            why, began = start(ranks, kind, out, memory)
            lines = lines_of(out)
            if why or len(lines) != ranks:
                return {}, [f"{name}, {ranks} ranks: {why or 'a rank wrote nothing'}"]
            seconds[name] = max(line["ready"] for line in lines) - began
            if kind in ("thread", "process"):
                seconds[name + CALL] = max(line["call"] for line in lines)
        rounds.append(seconds)
    return {name: np.array([one[name] for one in rounds[WARM_UP:]]) for name in rounds[0]}, []


def start(ranks: int, kind: str, out: Path, memory: Path) -> tuple[str, float]:
    """Run a program until it ends. Return what went wrong, and its start on the monotonic clock."""
    argv = [sys.executable, str(START_PY), kind, str(out), str(memory)]
    env = {"TMPDIR": str(memory), "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(memory / "bytecode"),
           "PYTHONDONTWRITEBYTECODE": ""}  # fmt: skip
    command: Sequence[str] = argv
    if ranks > 1:
        command, env = mpiexec(ranks, argv, env)
    began = time.monotonic()
    return run_until(command, PATIENCE_S, KILL_S, env={**os.environ, **env}), began


def rows_of(ranks: int, samples: Samples) -> list[Row]:
    """Make the rows of one table."""
    case = "One rank, started by itself" if ranks == 1 else f"{ranks} ranks, under mpiexec"
    bare = samples[BARE]
    over = {BARE: bare, BARE_AND_A_BIT: bare + A_BIT_S}
    found = []
    for name, taken in samples.items():
        shows = "start" if name == KINDS["process"] + CALL else ""
        later = f"{1e3 * float(np.median(taken - bare)):+.0f} ms, median of the differences" * (name != BARE)
        spread = f"{1e3 * float(taken.min()):.0f} to {1e3 * float(taken.max()):.0f} ms"
        found.append(row(name, taken, over, shows, case=case, note="; ".join(filter(None, (spread, later)))))
    return found


if __name__ == "__main__":
    sys.exit(main())
