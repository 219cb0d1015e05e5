"""Measures how long a program takes until its Checkpointer is ready, and compares this with NumPy and MPI_Init alone.

    python benchmarks/startup/run.py [--ranks 1 2 4] [--repetitions 9] [--quick] [--json FILE]

It starts start.py again and again, each time as a new program. Several ranks start under mpiexec.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from bench.aims import BARE_AND_A_BIT
from bench.launch import KILL_S, lines_of, run_until
from bench.question import Question, parser_of
from bench.rows import Row, Samples, row

from mlflash.run.processes import mpiexec

START_PY = Path(__file__).with_name("start.py")
BARE = "import numpy, MPI_Init"
KINDS = {"bare": BARE, "checkpointer": "Checkpointer(...)"}
A_BIT_S = 0.15  # how much longer than a bare start a Checkpointer may take
WARM_UP = 1  # it writes the bytecode, which an installed package already has
PATIENCE_S = 60.0  # limit of one start


def main() -> int:
    parser = parser_of(__doc__, repetitions=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks of the programs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.repetitions = [1, 2], 2
    question = Question(args)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # otherwise its files in memory would stay
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlflash-bench-") as memory:
        for ranks in args.ranks:
            samples, why = measure(ranks, args.repetitions, Path(memory))
            question.wrong += [why] * bool(why)
            question.add([] if why else rows_of(ranks, samples))
    return question.finish()


def measure(ranks: int, repetitions: int, memory: Path) -> tuple[Samples, str]:
    """Start all kinds of programs in turn. Return the seconds by name, and what went wrong."""
    rounds = []
    for number in range(WARM_UP + repetitions):
        seconds: dict[str, float] = {}
        for kind, name in KINDS.items():
            out = memory / f"{ranks}-{number}-{kind}"
            why, start_s = start(ranks, kind, out, memory)
            lines = lines_of(out)
            if why or len(lines) != ranks:
                return {}, f"{name}, {ranks} ranks: {why or 'a rank wrote nothing'}"
            seconds[name] = max(line["ready"] - start_s if kind == "bare" else line["call"] for line in lines)
        rounds.append(seconds)
    return {name: np.array([seconds[name] for seconds in rounds[WARM_UP:]]) for name in rounds[0]}, ""


def start(ranks: int, kind: str, out: Path, memory: Path) -> tuple[str, float]:
    """Run a program until it ends. Return what went wrong, and its start on the monotonic clock."""
    argv = [sys.executable, str(START_PY), kind, str(out), str(memory)]
    env = {"TMPDIR": str(memory), "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(memory / "bytecode"),
           "PYTHONDONTWRITEBYTECODE": ""}  # fmt: skip
    command: Sequence[str] = argv
    if ranks > 1:
        command, env = mpiexec(ranks, argv, env)
    start_s = time.monotonic()
    return run_until(command, PATIENCE_S, KILL_S, env={**os.environ, **env}), start_s


def rows_of(ranks: int, samples: Samples) -> Iterator[Row]:
    """Yield the rows of one number of ranks."""
    over = {BARE: samples[BARE], BARE_AND_A_BIT: samples[BARE] + A_BIT_S}
    bare = f"{ranks} ranks under mpiexec" if ranks > 1 else "one rank, started by itself"
    for name, seconds in samples.items():
        shows = "start" if name == KINDS["checkpointer"] else ""
        yield row(name, seconds, over, shows, case="The call, and a bare start", column=bare)


if __name__ == "__main__":
    sys.exit(main())
