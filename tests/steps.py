"""Run the steps that land a change, or those of `make test`, side by side, and add up what they found.

Usage: steps.py [--share SHARE] [--mpi MPI] [--only STEP ...] share|test

``share`` is what CI runs: all steps, and of the big matrices the share that follows from the tree of this commit
(``--share 0`` to ``11`` for another, ``--share all`` for everything). ``test`` is the core: no frameworks, no nodes.

Lint, types and unit tests come first: where one of them fails, nothing else is begun. Then two lanes take what
computes, the longest first, so that both end at about the same time, and a third what waits for timers (Slurm's,
TCP's).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from share import SHARES, has, of_tree, taken
from stacks import FAILED, LATE
from tally import NEVER_BEGUN, tally
from waiting import until

REPO = Path(__file__).parents[1]
REPORTS = REPO / ".reports"
_LANES = {False: 2, True: 1}  # steps at a time: those that compute, those that wait
_ENDS_S = 20  # from SIGTERM to SIGKILL
_FIRST = 3  # of the tests that have failed in a step that hung
_LAST_LINE = 200  # characters of it that the summary has: of a step that hung, the file of the test that it hung in


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of make.

    Attributes:
        name: unique.
        make: targets and variables, as in a shell.
        seconds: how long it takes beside others on two cores, to begin with the longest.
        after: steps that must have passed before; as a rule the one that makes the environment.
        gate: nothing else begins before all of these have passed.
        waits: mostly for timers.
        part: ``(matrix, parts, case)`` of a matrix of steps, of which a share takes every so manieth.
        counts: its tests count themselves in a report; if not, it counts as one.
        instead_of: the step that a share leaves out which has this one.
    """

    name: str
    make: str
    seconds: float
    after: tuple[str, ...] = ("env",)
    gate: bool = False
    waits: bool = False
    part: tuple[str, int, int] | None = None
    counts: bool = True
    instead_of: str = ""

    @property
    def limit(self) -> float:
        """Seconds after which it is ended and has failed: a busy machine is slow, one that hangs is no use."""
        return 300 + 3 * self.seconds


def _environment(name: str, seconds: float, *after: str, gate: bool = False) -> Step:
    folder = name.replace("env", ".venv")
    stamps = ".tests" if name == "env-lint" else ".tests .installed"
    made = " ".join(f"{folder}/{stamp}" for stamp in stamps.split())
    return Step(name, made, seconds, after, gate=gate, counts=False)


def _chaos(case: int, name: str, options: str, after: str = "env") -> Step:
    return Step(name, f"chaos SEED={case + 1} {options}", 90, (after,), part=("chaos", 3, case), counts=False)


_ENVIRONMENTS = (
    _environment("env", 60, gate=True),
    _environment("env-lint", 10, gate=True),
    _environment("env-openmpi", 10, "env"),
    _environment("env-lightning", 20, "env"),
    _environment("env-megatron", 10, "env"),
    _environment("env-transformers", 60, "env"),
    _environment("env-files", 20, "env-transformers"),
    _environment("env-docs", 10, "env"),
)
_GATE = (
    Step("lint", "lint", 3, ("env-lint",), gate=True, counts=False),
    Step("type", "type", 15, ("env-lint", "env"), gate=True, counts=False),
    Step("unit", "unit", 60, gate=True),
)
_SIZES = (1, 2, 3, 4, 5, 8)  # numbers of ranks
_CORE = (
    Step("programs", "programs", 350, ("env-openmpi",)),  # one of them runs couriers of MPICH under Open MPI's launcher
    *(Step(f"test-{n}", f"test-{n}", 80) for n in _SIZES),
    Step("faults", "faults", 500),
)
# Whether each benchmark works; a quick run keeps no figures.
_QUESTIONS = (
    ("save", "restore", "dcp", "drain", "parity"),
    ("sizes", "transport", "scale", "megatron", "gpu"),
    ("training", "peers", "profile", "startup", "walltime", "own_files"),
)
# A training of each framework costs minutes, and what all of them have in common is in `adapters`.
_TRAININGS = (
    (Step("nemo", "nemo", 500, ("env-transformers", "env-lightning")),
     Step("deepspeed", "deepspeed", 180, ("env-transformers",))),
    (Step("megatron", "megatron", 400, ("env-megatron",)),
     Step("torchtitan", "torchtitan", 200, ("env-transformers",))),
    (Step("lightning", "lightning", 280, ("env-lightning",)),
     Step("transformers", "transformers", 240, ("env-transformers",))),
)  # fmt: skip
# What Open MPI does otherwise is in openmpi-faults and openmpi-cluster above all. Tests on ranks go together, as one
# that runs on 3 ranks only counts as skipped where no step has these.
_OPENMPI = (
    (Step("openmpi-test-5", "MPI=openmpi test-5", 120, ("env-openmpi",)),
     Step("openmpi-test-4", "MPI=openmpi test-4", 80, ("env-openmpi",)),
     Step("openmpi-test-3", "MPI=openmpi test-3", 50, ("env-openmpi",))),
    (Step("openmpi-faults", "MPI=openmpi faults", 220, ("env-openmpi",)),
     Step("openmpi-adapters", "MPI=openmpi adapters", 70, ("env-openmpi",))),
)  # fmt: skip
_REST = (
    *(Step(f"test-{n}-process", f"test-{n} COURIER=process", 110, part=("couriers that are processes", 3, case),
           instead_of=f"test-{n}") for case, n in enumerate(_SIZES)),
    Step("faults-thread", "faults COURIER=thread", 400, part=("couriers that are threads", 3, 0), instead_of="faults"),
    Step("files", "files", 80, ("env-files",)),
    Step("adapters", "adapters", 250, ("env-files",)),
    *(dataclasses.replace(step, part=("frameworks", 3, case)) for case, its in enumerate(_TRAININGS) for step in its),
    Step("docs", "docs", 120, ("env-docs",), counts=False),  # and browser, which waits for it
    Step("browser", "browser", 75, ("env", "docs")),
    Step("package", "package", 450),
    Step("demo", "demo", 40, counts=False),
    *(Step(f"bench-{its[0]}", f"bench BENCH='--quick --only {' '.join(its)}'", 100, ("env-megatron",), counts=False,
           part=("quick benchmarks", 3, case)) for case, its in enumerate(_QUESTIONS)),
    *(dataclasses.replace(step, part=("under Open MPI", 2, case)) for case, its in enumerate(_OPENMPI) for step in its),
    # What waits: a real Slurm, cut cables.
    Step("slurm", "slurm", 550, waits=True),
    Step("cluster", "cluster", 400, waits=True),
    Step("openmpi-cluster", "MPI=openmpi cluster", 150, ("env-openmpi",), waits=True),
    _chaos(0, "chaos", "MINUTES=1"),
    _chaos(1, "chaos-openmpi", "MPI=openmpi MINUTES=0.5 CHAOS='--transport rma --ranks-per-node 2'", "env-openmpi"),
    _chaos(2, "chaos-parity", "MINUTES=0.5 CHAOS='--redundancy rs:2+2'"),
)  # fmt: skip


class Run:
    """Steps that wait for their turn, that run, and that have ended."""

    def __init__(self, steps: Sequence[Step], environment: dict[str, str]):
        self._environment = environment
        self._left = sorted(steps, key=lambda step: -step.seconds)
        self._known = {step.name for step in steps}
        self._gate = {step.name for step in steps if step.gate}
        self._running: dict[Step, tuple[subprocess.Popen[bytes], float]] = {}
        self.took: dict[str, float] = {}
        self.failed: dict[str, str] = {}  # step -> how it ended

    def all(self) -> None:
        """Run them; those that wait for one that failed are never begun, and have failed."""
        try:
            while self._begin() or self._running:
                until(lambda: any(map(self._is_over, self._running)), "a step to end", timeout_s=math.inf)
                self._take_those_that_are_over()
        finally:
            for process, _ in self._running.values():
                _end(process)
        self.failed |= {step.name: NEVER_BEGUN for step in self._left}

    def _begin(self) -> bool:
        """Begin what may begin; whether anything did."""
        begun = False
        for step in list(self._left):
            lane = [other for other in self._running if other.waits == step.waits]
            if len(lane) < _LANES[step.waits] and self._may_begin(step):
                self._left.remove(step)
                print(f"--- {step.name}: make {step.make}", flush=True)
                self._running[step] = self._start(step), time.monotonic()
                begun = True
        return begun

    def _may_begin(self, step: Step) -> bool:
        wanted = set(step.after) & self._known
        if not step.gate:
            wanted |= self._gate
        return all(self.took.get(name) is not None and name not in self.failed for name in wanted)

    def _start(self, step: Step) -> subprocess.Popen[bytes]:
        command = ["make", "--no-print-directory", *shlex.split(step.make)]
        with (REPORTS / f"{step.name}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=REPO, env=self._environment, stdin=subprocess.DEVNULL, stdout=log,
                                    stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def _is_over(self, step: Step) -> bool:
        """Whether it has ended, or takes too long."""
        process, start = self._running[step]
        return process.poll() is not None or time.monotonic() - start > step.limit

    def _take_those_that_are_over(self) -> None:
        for step in list(filter(self._is_over, self._running)):
            process, start = self._running.pop(step)
            took = self.took[step.name] = time.monotonic() - start
            hung = process.returncode is None
            ended = "ended at its limit" if hung else f"exit {process.returncode}"
            _end(process)
            said = (REPORTS / f"{step.name}.log").read_text(errors="replace").rstrip()
            if process.returncode != 0:
                lines = said.splitlines() or ["nothing"]
                about = [line for line in lines if line.startswith(FAILED)][:_FIRST] if hung else []
                about += [line for line in lines if line.endswith(LATE)][-1:] if hung else []
                about = about or [f"its last line: {lines[-1][-_LAST_LINE:]}"]
                self.failed[step.name] = f"{ended} after {took:.0f} s; {'; '.join(about)}"
            print(f"=== {step.name}\n{said}\n=== {step.name}: {ended} after {took:.0f} s", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a step has started and is still there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_ENDS_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def tree_of_this_commit() -> str:
    """The hash of what is committed here; 0 where there is no Git."""
    if shutil.which("git") is None or not (REPO / ".git").exists():
        return "0"
    said = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=REPO, capture_output=True, text=True, check=True)
    return said.stdout.strip()


def share_of_this_commit() -> int:
    """The share that CI takes of what is committed here; 0 where there is no Git."""
    tree = tree_of_this_commit()
    if tree != "0":
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=REPO, capture_output=True, text=True, check=True)
        if changed.stdout:
            print("Not everything is committed: CI will take another share.", flush=True)
    return of_tree(tree)


def chosen(what: str, mpi: str, share: int | None) -> tuple[list[Step], list[Step]]:
    """The steps to run, and those that are left out."""
    if what == "test":
        mine = [step for step in (*_ENVIRONMENTS, *_GATE) if step.gate]
        core = [dataclasses.replace(step, after=("env",)) for step in _CORE]
        if mpi == "openmpi":
            mine += [step for step in _ENVIRONMENTS if step.name == "env-openmpi"]
            core = [dataclasses.replace(step, make=f"MPI=openmpi {step.make}", after=("env-openmpi",)) for step in core]
        return [*mine, *core], list(_REST)
    every = [*_ENVIRONMENTS, *_GATE, *_CORE, *_REST]
    mine = [step for step in every if share is None or step.part is None or has(share, *step.part)]
    if share is not None:
        replaced = {step.instead_of for step in mine}
        mine = [step for step in mine if step.name not in replaced]
    return mine, [step for step in every if step not in mine]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["share", "test"])
    parser.add_argument("--share", help=f"0 to {SHARES - 1}, or all; default: that of the commit")
    parser.add_argument("--mpi", default="mpich", choices=["mpich", "openmpi"], help="of `test`")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, in the environments that are there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs is ended, too
    share = taken(args.share) if args.share else share_of_this_commit()
    steps, left_out = chosen(args.what, args.mpi, share)
    if args.only:
        every = [*steps, *left_out]
        steps = [step for step in every if step.name in args.only]
        left_out = [step for step in every if step not in steps]
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    start = time.monotonic()
    environment = {**os.environ, "MLFLASH_TEST_SHARE": "all" if share is None else str(share)}
    run = Run(steps, environment)
    run.all()
    print("\nThe steps, by the seconds they took:")
    for name, seconds in sorted(run.took.items(), key=lambda item: -item[1]):
        print(f"{seconds:7.0f}  {name}{'  FAILED' if name in run.failed else ''}")
    uncounted = [step.name for step in steps if not step.counts and step.name not in run.failed]
    part = "all of the big matrices" if share is None else f"share {share} of {SHARES} of the big matrices"
    about = f"""\
Part of it, in {(time.monotonic() - start) / 60:.0f} minutes: {part}; {", ".join(run.took)}.
Not part of it: {", ".join(step.name for step in left_out) or "nothing"}."""
    return tally(REPORTS, run.failed, len(uncounted), about)


if __name__ == "__main__":
    sys.exit(main())
