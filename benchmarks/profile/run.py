"""Measures where the time of a save goes, in the trainer and in its courier, in memcpys of the same bytes.

    python benchmarks/profile/run.py [--mib 256] [--repetitions 7] [--quick] [--json FILE]

Two ranks run on this machine under mpiexec, each on a node of its own. The functions of each part are wrapped in
clocks, which costs a save a few microseconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from bench.aims import MEMCPY
from bench.clock import TIMEOUT_S, Bench
from bench.launch import HOME, Part
from bench.question import Question, parser_of
from bench.rows import row
from bench.states import Yardsticks, bytes_of, change, large_state
from bench.timed_parts import OUT, TimedParts, of_trainer

from mlflash import Checkpointer
from mlflash.channel import connection


def profile(bench: Bench, nbytes: int, redundancy: str) -> None:
    """Save some times, and write the parts of each side. The ranks write those of rank 0."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])
    os.environ[OUT] = str(bench.memory / "parts")
    connection.ENTRY = "bench.timed_parts:run"
    yardsticks, state = Yardsticks(bench.comm, bench.memory, nbytes), large_state(nbytes)
    parts, seconds, of_couriers = TimedParts(of_trainer()), list[dict[str, float]](), Path(f"{os.environ[OUT]}-{{}}")
    memcpy = yardsticks.of(bytes_of(state))[MEMCPY]
    with bench.job("profile") as job, bench.checkpointer(job, redundancy=redundancy) as ckpt:
        ckpt.prepare(state)
        for number in range(bench.warm_up + bench.repetitions):
            change(state)
            bench.comm.Barrier()
            start = time.perf_counter()
            memcpy()
            memcpy_s = time.perf_counter() - start
            bench.comm.Barrier()
            taken = saved(ckpt, number + 1, state, parts, Path(str(of_couriers).format(bench.comm.rank)))
            seconds += [{MEMCPY: memcpy_s, **taken}] * (number >= bench.warm_up)
    yardsticks.free()
    samples = {name: np.array([second[name] for second in seconds]) for name in seconds[0]}
    for name, values in samples.items():
        if name != MEMCPY:
            what, column = name.rsplit(": ", 1)
            case = f"The parts of a save, {redundancy}"
            bench.rows(row(what, values, {MEMCPY: samples[MEMCPY]}, case=case, column=column))


def saved(ckpt: Checkpointer, step: int, state: dict[str, object], parts: TimedParts, out: Path) -> dict[str, float]:
    """Save once; return the seconds of all parts, by side, name and clock."""
    parts.take()
    ckpt.save(step, state).wait()
    sides, end = {"trainer": parts.take()}, time.monotonic() + TIMEOUT_S
    while not out.exists() or len(lines := out.read_text().splitlines()) < step:
        if time.monotonic() > end:
            raise TimeoutError(f"the courier has not told the parts of step {step}")
        time.sleep(1e-3)
    sides["courier"] = json.loads(lines[step - 1])
    return {
        f"{side}: {name}: {clock}": value
        for side, taken in sides.items()
        for name, both in taken.items()
        for clock, value in zip(("wall", "CPU"), both, strict=True)
    }


def main() -> int:
    parser = parser_of(__doc__, repetitions=7)
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensors per rank, a multiple of 8")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 32, 3
    settings = {"nbytes": args.mib << 20}
    return Question(args).run([Part(2, profile, {**settings, "redundancy": way}) for way in ("none", "copy")])


if __name__ == "__main__":
    sys.exit(main())
