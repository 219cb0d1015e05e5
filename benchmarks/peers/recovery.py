"""Compares recoveries: three ranks train a toy (toy.py), one is killed, and the others train on.

    python benchmarks/peers/recovery.py [--pythons PACKAGE=PYTHON ...] [--only NAME ...] [--repetitions 5] ...

A repetition kills the same rank after the same random time under each system, in random order. Each peer can have a
Python of its own, with the same PyTorch as mlflash. A peer that is not installed is left out:

    pip install nvidia-resiliency-ext==0.4.1    # --pythons nvidia_resiliency_ext=.../bin/python
    pip install torchft==0.2.0                  # --pythons torchft=.../bin/python
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from bench.question import Question, parser_of
from bench.rows import Row

RANKS, FIRST, LAST, MORE = 3, 10, 80, 10  # steps: before a kill, of an uninterrupted run, after the recovery
PAUSE_S, WAITS_S = 0.02, 150.0
KINDS = (int, float, float, int, int, str)  # of what toy.py notes
SYSTEMS = {  # the package, what toy.py runs, and options of the launcher
    "mlflash, a spare": ("mlflash", "mlflash", ["--spares", "1"]),
    "mlflash, --min-ranks": ("mlflash", "mlflash", ["--min-ranks", "2"]),
    "NVRx, a reserve rank": ("nvidia_resiliency_ext", "nvrx", []),
    "torchft": ("torchft", "torchft", []),
    "torchft, heartbeats of 1 s": ("torchft", "torchft", ["--heartbeat_timeout_ms", "1000"]),
}


class Step(NamedTuple):
    """A step that a process began, and what it noted at the end, if it came so far."""

    pid: int
    step: int
    begun: float
    ended: float = 0.0
    rank: int = -1
    size: int = 0
    digest: str = ""


class Training:
    """The toy under a system. All its processes are ended after the block."""

    def __init__(self, name: str, python: str, pause_s: float = PAUSE_S):
        package, toy, options = SYSTEMS[name]
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlflash-recovery-")
        self.out, self._processes = Path(self._folder.name), list[subprocess.Popen[bytes]]()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self._port = free.getsockname()[1]
        (self.out / "memory").mkdir()
        self._toy = [python, str(HERE / "toy.py"), toy, str(self.out), str(pause_s), str(RANKS)]
        if package == "mlflash":
            command = [python, "-m", "mlflash", "run", "-N1", "--ranks-per-node", str(RANKS), "--job", "toy", *options]
            self._start([*command, "--keep-alive", "--", *self._toy])
        elif package == "torchft":  # as in its README
            command = [str(Path(python).with_name("torchft_lighthouse")), "--bind", f"[::]:{self._port}", *options]
            self._start([*command, "--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"])
        for rank in range({"mlflash": 0, "torchft": RANKS}.get(package, RANKS + 1)):
            self.start_rank(rank)

    def start_rank(self, rank: int) -> None:
        self._start(self._toy, RANK=rank, WORLD_SIZE=RANKS + 1, MASTER_ADDR="localhost", MASTER_PORT=self._port,
                    TORCHFT_LIGHTHOUSE=f"http://localhost:{self._port}")  # fmt: skip

    def _start(self, command: list[str], **variables: Any) -> None:
        variables |= {"OMP_NUM_THREADS": 1, "MLFLASH_MEMORY": self.out / "memory", "TMPDIR": self.out}
        env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        with (self.out / "output").open("ab") as output:
            self._processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=self.out))

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        self._folder.cleanup()

    def until(self, condition: Callable[[], Any]) -> None:
        end_s = time.monotonic() + WAITS_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError((self.out / "output").read_text(errors="replace")[-3000:])
            time.sleep(0.1)

    def steps(self) -> list[Step]:
        """Return all steps, in the order in which they were ended, after those that were not."""
        steps: list[Step] = []
        for path in self.out.glob("steps-*"):
            for line in path.read_text().split("\n")[1:]:
                fields = [kind(text) for kind, text in zip(KINDS, line.split(), strict=False)]
                steps.append(Step(int(path.name[6:]), *fields))  # type: ignore[arg-type]
        return sorted(steps, key=lambda step: step.ended)

    def full(self, after: float, size: int = 0) -> list[Step]:
        """Return the first step that all its ranks began after a time and ended, once for each rank, or nothing."""
        full: dict[tuple[int, int], dict[int, Step]] = {}
        for step in self.steps():
            if step.ended and step.begun > after and step.size == (size or step.size):
                full.setdefault((step.step, step.size), {})[step.pid] = step
                if len(alike := full[step.step, step.size]) == step.size:
                    return [*alike.values()]
        return []


def uninterrupted(name: str, python: str) -> dict[int, str]:
    """Return the digest of the weights after each step."""
    with Training(name, python, pause_s=0.0) as training:
        (training.out / "stop").write_text(str(LAST))
        training.until(lambda: training.steps() and training.steps()[-1].step == LAST)
        return {step.step: step.digest for step in training.steps() if step.ended}


def attacked(name: str, python: str, rank: int, delay_s: float, expected: dict[int, str]) -> dict[str, Any]:
    """Kill a rank, and measure what follows. Bits are compared at the last step of the uninterrupted run."""
    with Training(name, python) as training:
        waiting = RANKS if "--min-ranks" in name or "torchft" in name else RANKS + 1
        training.until(lambda: len([*training.out.glob("ready-*")]) >= waiting)
        training.until(lambda: training.full(0) and training.steps()[-1].step >= FIRST)
        time.sleep(delay_s)
        ranks = {step.rank: step.pid for step in training.steps() if step.ended}
        victim, start = ranks.pop(rank), time.time()
        os.kill(victim, signal.SIGKILL)
        if "torchft" in name:
            training.start_rank(rank)
        training.until(lambda: training.full(start, RANKS))
        stop, written = training.steps()[-1].step + MORE, training.out / "written"
        written.write_text(str(stop))
        written.rename(training.out / "stop")
        training.until(lambda: sum(step.step == stop and step.size > 0 for step in training.steps()) >= RANKS)
        steps, first, common = training.steps(), training.full(start), min(stop, LAST)
        digests = {step.digest for step in steps if step.step == common and step.ended}
        began = [[step.step for step in steps if step.pid == pid] for pid in ranks.values()]
        return {
            "s until the next full step": first[-1].ended - start,
            "s until all ranks train": training.full(start, RANKS)[-1].ended - start,
            "steps computed again": max(len(numbers) - len({*numbers}) for numbers in began),
            "survivors kept their process": {*ranks.values()} <= {step.pid for step in first},
            "bits of a run without a loss": digests == {expected[common]},
        }


def rows_of(name: str, samples: list[dict[str, Any]]) -> Iterator[Row]:
    for column in samples[0]:
        values = sorted(sample[column] for sample in samples)
        median = f"{values[len(values) // 2]:.2g} ({values[0]:.2g} to {values[-1]:.2g})"
        note = f"{sum(values)} of {len(values)}" if isinstance(values[0], bool) else median
        yield Row(what=name, column=column, note=note)


def main() -> int:
    parser = parser_of(__doc__, repetitions=5, timeout_s=1200)
    parser.add_argument("--pythons", nargs="+", default=[], metavar="PACKAGE=PYTHON", help="the Python of a package")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="NAME", help="some systems")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # also ends the training that runs
    if args.quick:
        args.only, args.repetitions = ["mlflash, a spare"], 2
    question, dice, end_s = Question(args), random.Random(0), time.monotonic() + args.timeout_s
    pythons = {"mlflash": sys.executable, **dict(text.split("=", 1) for text in args.pythons)}
    names = [name for name in args.only if SYSTEMS[name][0] in pythons or find_spec(SYSTEMS[name][0])]
    python = {name: pythons.get(SYSTEMS[name][0], sys.executable) for name in names}
    first = {SYSTEMS[name][0]: name for name in reversed(names)}
    expected = {package: uninterrupted(name, python[name]) for package, name in first.items()}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.repetitions):
        rank, delay_s = dice.randrange(1, RANKS), dice.random()  # not 0, without which NVRx ends
        for name in dice.sample(names, len(names)) if time.monotonic() < end_s else ():
            try:
                results[name].append(attacked(name, python[name], rank, delay_s, expected[SYSTEMS[name][0]]))
            except TimeoutError as error:
                question.wrong.append(f"{name}: {error}")
            print(f"{name}: {results[name][-1:]}", file=sys.stderr, flush=True)
    question.add(row for name, samples in results.items() if samples for row in rows_of(name, samples))
    question.add([{"not installed": "; ".join(name for name in args.only if name not in names)}])
    return question.finish()


if __name__ == "__main__":
    sys.exit(main())
