"""What chaos.py prints: a line per event while it runs, a table and a summary at the end."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from chaos_launch import Attacked
from chaos_plan import STOP, Event, Memory

from mlflash.launcher.processes import find_mpiexec


@dataclasses.dataclass
class Row:
    """An event that ended a launch, or a stop (which ends none)."""

    kind: str
    ranks: list[int]
    nodes: set[int]
    detail: str = ""
    restored: str = "-"
    steps_lost: int | None = None
    seconds: float | None = None
    killed_at: float = 0.0
    reached: int = 0


class Account:
    """Everything that happened."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.rows: list[Row] = []
        self.launches = self.final_step = self.steps = 0
        self.late_launches = self.failed_saves = 0
        self.equal = False
        self._stopped: set[int] = set()

    def stops_in(self, job: Attacked) -> bool:
        """Whether a rank of this launch was stopped for a while, or its courier killed: saves may have failed."""
        return job.number in self._stopped

    def restored(self, job: Attacked, due: list[Row], step: int | None, first_step_at: float | None) -> None:
        """A launch restored a step (None: nothing), after these events."""
        self.steps += max(0, job.reached() - (step or 0))
        self.failed_saves += len(job.of("failed")) // job.ranks
        for row in due:
            row.restored = str(step)
            if row is due[0]:  # the others hit launches that had not got so far as to lose anything
                row.steps_lost = max(0, row.reached - (step or 0))
            row.seconds = None if first_step_at is None else first_step_at - row.killed_at
        after = "" if not due else f", {due[0].steps_lost} steps lost"
        if due and due[-1].seconds is not None:
            after += f", {due[-1].seconds:.1f} s from the kill to the first step"
        ranks = len(job.of("restored"))
        self._say(f"launch {job.number}: restored {step} on {ranks} ranks, bits right{after}")

    def killed(self, job: Attacked, row: Row, reached: int, memory: Memory) -> None:
        """A launch was killed."""
        row.killed_at, row.reached = job.killed_at, reached
        self.rows.append(row)
        what = f"{row.kind}: rank {', '.join(map(str, row.ranks))}"
        if row.nodes:
            what += f"; memory of node {', '.join(map(str, sorted(row.nodes)))} wiped"
        if row.detail:
            what += f"; {row.detail}"
        state = "nothing is promised" if memory.promised is None else f"{memory.promised} or newer is promised"
        self._say(f"launch {job.number}: {what} | step {reached}, committed {job.committed()}, {state}")

    def stopped(self, job: Attacked, what: Event, before: int, at: int, seconds: float) -> None:
        """A rank was stopped, or its courier killed, and the job has caught up."""
        self._stopped.add(job.number)
        late = "is late" in job.log()
        self.late_launches += late
        self.rows.append(Row(what.kind, [what.rank], set(), seconds=seconds))
        how_long = f" for {what.stop_s:.1f} s" if what.kind == STOP else ""
        self._say(f"launch {job.number}: {what.kind}: rank {what.rank}{how_long}, from step {before} to {at}"
                  f"{', past the deadline' if late else ''} | next commit {seconds:.1f} s after")  # fmt: skip

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:7.1f} s] {text}", flush=True)

    def summary(self) -> dict[str, Any]:
        """Everything as plain values."""
        kinds = {}
        for kind in sorted({row.kind for row in self.rows}):
            rows = [row for row in self.rows if row.kind == kind]
            lost = [row.steps_lost for row in rows if row.steps_lost is not None]
            seconds = [row.seconds for row in rows if row.seconds is not None]
            kinds[kind] = {
                "events": len(rows),
                "mean steps lost": sum(lost) / len(lost) if lost else None,
                "max steps lost": max(lost, default=None),
                "mean seconds": sum(seconds) / len(seconds) if seconds else None,
                "max seconds": max(seconds, default=None),
            }
        return {
            "mpi": find_mpiexec()[1],
            "seconds": time.monotonic() - self.started,
            "launches": self.launches,
            "events": kinds,
            "steps computed": self.steps,
            "final step": self.final_step,
            "failed saves": self.failed_saves,
            "launches past a deadline that caught up": self.late_launches,
            "final state equals that of an uninterrupted run": self.equal,
        }

    def table(self) -> str:
        """The summary for people."""
        summary = self.summary()
        lines = ["", f"{'event':<30}{'times':>6}{'steps lost, mean':>18}{'max':>9}{'seconds, mean':>15}{'max':>7}"]
        for kind, row in summary.pop("events").items():
            cells = [row["mean steps lost"], row["max steps lost"], row["mean seconds"], row["max seconds"]]
            mean, most, seconds, longest = ("-" if cell is None else f"{cell:.1f}" for cell in cells)
            lines.append(f"{kind:<30}{row['events']:>6}{mean:>18}{most:>9}{seconds:>15}{longest:>7}")
        lines.append("(seconds: from the kill to the first new step; of what goes on: from its end to the next commit)")
        for name, value in summary.items():
            text = (
                {True: "yes", False: "NO"}[value]
                if isinstance(value, bool)
                else f"{value:.4g}"
                if isinstance(value, float)
                else value
            )
            lines.append(f"{name}: {text}")
        return "\n".join(lines)
