"""``mlflash demo --keep-alive``: train, train again and lose a rank while the other process stays, and compare."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..config import DISABLE
from .comparison import differences, print_rows
from .one_launch import DemoFailed, Launched, Training
from .plan import KEPT_RANKS, Plan

_RUN = ["run", "-N", "1", "--ranks-per-node", str(KEPT_RANKS), "--keep-alive", "--spares"]
_TIMEOUT_S = 120.0
_JOURNAL = "run.jsonl"


@dataclasses.dataclass
class Told:
    """What the processes of one job logged.

    Attributes:
        starts: the lines that processes logged when they began to train, by rank, in order.
        steps: step → when each rank finished it for the last time, Unix seconds.
        losses: step → loss on rank 0, in nats per byte.
        killed_at: when a rank was killed, Unix seconds; 0 before that.
        finished: the last step that each rank had finished then.
    """

    starts: dict[int, list[dict[str, Any]]] = dataclasses.field(
        default_factory=lambda: {rank: [] for rank in range(KEPT_RANKS)}
    )
    steps: dict[int, dict[int, float]] = dataclasses.field(default_factory=dict)
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    killed_at: float = 0.0
    finished: dict[int, int] = dataclasses.field(default_factory=dict)

    def note(self, rank: int, line: dict[str, Any]) -> None:
        """Add a line of a rank's log."""
        if line["event"] == "start":
            self.starts[rank].append(line)
        elif line["event"] == "step":
            self.steps.setdefault(line["step"], {})[rank] = line["time"]
            if not self.killed_at or line["time"] <= self.killed_at:
                self.finished[rank] = line["step"]
            if rank == 0:
                self.losses[line["step"]] = line["loss"]

    def last_step(self, rank: int) -> int:
        """Return the last step that a rank has finished."""
        return max((step for step, times in self.steps.items() if rank in times), default=0)


def train_and_compare(plan: Plan, console: Console, folder: Path, bars: Progress) -> list[str]:
    """Train twice, and print the results. Not collective: it starts the ranks itself.

    Returns:
        A line for each final tensor that differs.

    Raises:
        DemoFailed: a run did not end as it should.
    """
    print_rows(console, [
        ("training", f"a small GPT, DDP over gloo, {plan.steps} steps; {KEPT_RANKS} ranks and a waiting process"),
        ("with", f"mlflash {' '.join(_RUN)} 1; redundancy {plan.redundancy}; seed {plan.seed}"),
    ])  # fmt: skip
    with bars:
        whole = _follow(plan, folder / "uninterrupted", plan.reference, bars, is_killed=False)
        kept = _follow(plan, folder / "losing-a-rank", plan.job, bars, is_killed=True)
    print_rows(console, _account(plan, whole, kept, _recovered(folder / "losing-a-rank")))
    return differences(folder / "uninterrupted", folder / "losing-a-rank", KEPT_RANKS)


def _follow(plan: Plan, folder: Path, job: str, bars: Progress, is_killed: bool) -> Told:
    """Start the job and show its progress. Kill a rank in the step of the plan."""
    folder.mkdir()
    bar = bars.add_task(folder.name.replace("-", " "), total=None)  # the bar pulses while the processes start
    told = Told()
    with Training(folder, KEPT_RANKS, _launched(plan, folder, job, int(is_killed)), _TIMEOUT_S, stays=True) as training:
        for rank, line in training.events():
            told.note(rank, line)
            bars.update(bar, completed=told.last_step(0), total=plan.steps if told.starts[0] else None)
            if is_killed and not told.killed_at and told.last_step(plan.doomed) >= plan.kill_step - 1:
                times = [min(its.values()) for its in told.steps.values()]
                time.sleep(plan.moment * (times[-1] - times[0]) / max(1, len(times) - 1))
                told.killed_at = time.time()
                training.kill([plan.doomed])
        if is_killed and not told.killed_at:
            raise DemoFailed(f"training ended before step {plan.kill_step}, in which the demo kills a rank")
        if any(len(lines) != 1 + is_killed for lines in told.starts.values()):
            raise DemoFailed(f"a process did not begin to train as often as expected; {training.log_tail()}")
    bars.stop_task(bar)
    return told


def _launched(plan: Plan, folder: Path, job: str, spares: int) -> Launched:
    """Return the command of `mlflash run`, as a user calls it. It ends if it cannot continue."""
    its = ["--job", job, "--journal", str(folder / _JOURNAL), "--max-restarts", "0", "--grace", "0"]
    program = ["-m", "mlflash.demo.kept_train", "--steps", str(plan.steps), "--seed", str(plan.seed)]
    program = [sys.executable, *program, "--folder", str(folder)]
    command = [sys.executable, "-m", "mlflash", *_RUN, str(spares), *its, "--", *program]
    # For copies, each rank counts as a node.
    env = {"MLFLASH_REDUNDANCY": plan.redundancy, "MLFLASH_RANKS_PER_NODE": "1", "TMPDIR": str(folder), DISABLE: ""}
    return Launched(command, {"OMP_NUM_THREADS": "1", **env})


def _recovered(folder: Path) -> dict[str, Any]:
    """Return the line of the journal that records the recovery."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / _JOURNAL).read_text().splitlines()]
    found = [line for line in lines if line["event"] == "recovered"]
    if len(found) != 1:
        raise DemoFailed(f"{folder / _JOURNAL} has {len(found)} lines about a replaced rank instead of one")
    return found[0]


def _account(plan: Plan, whole: Told, kept: Told, recovered: dict[str, Any]) -> list[tuple[str, str]]:
    doomed, step = plan.doomed, recovered["step"]
    stayed = [rank for rank in range(KEPT_RANKS) if rank != doomed]
    pids = {rank: [line["pid"] for line in lines] for rank, lines in kept.starts.items()}
    if any(pids[rank][0] != pids[rank][1] for rank in stayed):
        raise DemoFailed(f"a process should have stayed, but did not: {pids}")
    finished = kept.finished[doomed]
    began_s = max(lines[1]["time"] for lines in kept.starts.values()) - kept.killed_at
    ended_s = max(kept.steps[step + 1].values()) - kept.killed_at
    parts = ", ".join(f"{name} {took:.2f} s" for name, took in recovered["times"].items()
                      if took <= recovered["seconds"])  # fmt: skip
    return [
        ("killed", f"rank {doomed} (process {pids[doomed][0]}) with SIGKILL in step {finished + 1}"),
        *(("stayed", f"rank {rank}: process {pids[rank][1]}, the same as before") for rank in stayed),
        ("replaced", f"rank {doomed} by process {pids[doomed][1]}, which had waited"),
        ("continued", f"from step {step}, {began_s:.1f} s after the kill; step {step + 1} ended after {ended_s:.1f} s"),
        ("of this time", f"{parts}, each on the slowest rank"),
        ("trained again", f"{max(finished - step, 0)} of {finished} finished steps"),
        ("loss", f"{kept.losses[plan.steps]:.4f}, uninterrupted {whole.losses[plan.steps]:.4f}"),
    ]  # fmt: skip
