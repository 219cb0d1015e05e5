"""Let ckpt-chaos judge trainings that save with mlflash, and the same trainings that save without it.

Usage: python -m suites.judge [--points N] [NAME ...]

ckpt-chaos kills a training at each file that it wants to open, make, rename or remove, or when that is cut in half,
starts it again, and judges how it goes on. `judged/whole_job.py` says which process it kills. Prints one table, and
fails where a verdict is not as expected. What ckpt-chaos printed is in .reports/judge.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from ckpt_chaos.runner import Row, rejudge
from processes import killed_in_the_end, send, with_variable
from waiting import until

JOB = Path(__file__).parent / "judged" / "whole_job.py"
REPORTS = Path(__file__).parents[2] / ".reports" / "judge"
VERDICTS = ("PASS", "LOST_WORK", "HARD_FAIL", "SILENT_DIVERGENCE")
HEAD = ("training", "saves by", "killed", "memory", "events", "killed at", *VERDICTS)
_LIMIT_S = 600  # for each start of a training, and for imports, on a machine that does other things


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and where it is killed.

    Attributes:
        script: in `judged`.
        saves_by: its argument.
        armed, memory: see `judged/whole_job.py`.
        points: at so many events it is killed, evenly spread; so many events are more than it has: at each.
        may: verdicts that are expected besides PASS.
        must: of these, what has to be found where it is killed at each event.
    """

    script: str
    saves_by: str
    armed: str
    memory: str
    points: int
    may: tuple[str, ...] = ()
    must: tuple[str, ...] = ()


ALL = 1000
CASES = (
    Case("loop", "mlflash", "courier", "lost", ALL),
    Case("loop", "mlflash", "courier", "kept", ALL),
    Case("loop", "mlflash", "trainer", "kept", ALL),
    Case("loop", "torch", "trainer", "kept", ALL, ("HARD_FAIL",), ("HARD_FAIL",)),
    Case("dcp_loop", "mlflash", "courier", "lost", 20),
    Case("dcp_loop", "mlflash", "trainer", "kept", ALL),
    Case("dcp_loop", "torch", "trainer", "kept", ALL),
    Case("hf_trainer", "mlflash", "trainer", "lost", 20),
    Case("hf_trainer", "mlflash", "courier", "lost", 20),
    Case("hf_trainer", "mlflash", "trainer", "kept", 20),
    Case("hf_trainer", "trainer", "trainer", "kept", 20, ("HARD_FAIL", "LOST_WORK"), ("HARD_FAIL",)),
    # Between the file of a step and last.ckpt, Lightning's "last" is the older step.
    Case("lightning_fit", "mlflash", "courier", "lost", 20, ("LOST_WORK",)),
    Case("lightning_fit", "mlflash", "trainer", "lost", ALL, ("LOST_WORK",)),
    Case("lightning_fit", "lightning", "trainer", "kept", ALL, ("HARD_FAIL", "LOST_WORK")),
)


class Judged:
    """What became of a case.

    Attributes:
        cells: of the table.
        wrong: a line for all that is not as expected.
        drifted: points at which another file was killed at than in the run without a fault.
    """

    def __init__(self, case: Case, work: Path, rows: list[Row]):
        points = [row for row in rows if not row.label.startswith("no crash")]
        counted = Counter(row.verdict for row in points)
        events = (work / "reference" / "events.log.rank0").read_text().splitlines()
        self.drifted = sum(map(_drifts, work.glob("pt_[0-9]*")))
        self.cells = (case.script, case.saves_by, case.armed, case.memory, len(events), len(points),
                      *(counted[verdict] for verdict in VERDICTS))  # fmt: skip
        self.wrong = [f"{row.verdict}: {row.label}, newest {row.outcome.newest_complete_step}, {row.outcome}"
                      for row in rows if row.verdict not in ("PASS", *(case.may if row in points else ()))]  # fmt: skip
        self.wrong += [f"was not killed: {row.label}" for row in points if not row.crashed]
        if len(points) >= len(events):
            self.wrong += [f"not found once: {verdict}" for verdict in case.must if not counted[verdict]]


def _drifts(point: Path) -> bool:
    """Whether another file was killed at than planned; names of temporary files have digits of their run."""
    judged = json.loads((point / "result.json").read_text())
    log = [line.split("\t") for line in (point / "events.log.rank0").read_text().splitlines()]
    seen = [words[1:3] for words in log if words[0] == str(judged["point"][0])]
    found, planned = (re.sub(r"[0-9a-f]{16,}", "*", str(event)) for event in (seen, [judged["event"]]))
    return found != planned


@contextlib.contextmanager
def forking(script: str, folder: Path) -> Iterator[Path]:
    """A process that forks a training; gives its socket."""
    path = folder / script
    words = [sys.executable, str(JOB.with_name("warm.py")), str(path), f"{script}.py"]
    with killed_in_the_end(words, env={**os.environ, "PYTHONWARNINGS": "ignore"}) as process:
        until(lambda: path.exists() or process.poll() is not None, "imports", timeout_s=_LIMIT_S)
        yield path


def judge(case: Case, work: Path, points: int, warm: Path) -> Judged:
    """Let ckpt-chaos run a case in a directory that is not there yet, with trainings that `warm` forks."""
    checkpoints = "{out}/run/step-*" if case.script.endswith("loop") else "{out}/*/*[-=][0-9]*"
    jobs = 2 * (os.cpu_count() or 1)  # each waits for half of its time
    command = [
        sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--jobs", str(jobs), "--timeout", str(_LIMIT_S),
        "--max-points", str(min(points, case.points)), "--step-regex", r"resumed from step (\d+)",
        "--checkpoint-glob", checkpoints, "--result-file", "{out}/final.pt",
        "--", sys.executable, str(JOB), "{out}", case.armed, case.memory, case.saves_by,
    ]  # fmt: skip
    if case.armed == "courier":  # mlflash's files are none of those that it can cut
        command[4:4] = ["--modes", "before"]
    log = REPORTS / f"{case.script}-{case.saves_by}-{case.armed}-{case.memory}.log"
    with log.open("w") as out:
        environment = {**os.environ, "JUDGED_WARM": str(warm)}
        subprocess.run(command, stdout=out, stderr=out, cwd=work.parent, env=environment, check=False)
    if not (work / "pt_control" / "result.json").exists():
        raise SystemExit(log.read_text())
    return Judged(case, work, rejudge(work))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--points", type=int, default=ALL, help="at most so many for each line of the table")
    parser.add_argument("names", nargs="*", help="scripts; default: all")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    REPORTS.mkdir(parents=True, exist_ok=True)
    works = Path(tempfile.mkdtemp(prefix="mlflash-judge-", dir="/dev/shm"))
    found = []
    try:
        for script in given.names or dict.fromkeys(case.script for case in CASES):
            with forking(script, works) as warm:
                for case in (case for case in CASES if case.script == script):
                    found.append(judge(case, works / str(len(found)), given.points, warm))
                    print(*found[-1].cells, *found[-1].wrong, sep="  ", flush=True)
    finally:
        send(signal.SIGKILL, with_variable(f"\0JUDGED={works}/"))
        shutil.rmtree(works)
    print(f"\nckpt-chaos {metadata.version('ckpt-chaos')}\n")
    for cells in (HEAD, ["---"] * len(HEAD), *(judged.cells for judged in found)):
        print(f"| {' | '.join(map(str, cells))} |")
    print(f"\nkilled at another file than planned: {sum(judged.drifted for judged in found)}")
    for judged in found:
        print(*judged.wrong, sep="\n")
    return int(not found or any(judged.wrong for judged in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
