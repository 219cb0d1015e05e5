"""Kill a training job at random moments, again and again, and hold mlflash to what it promises.

    PYTHONPATH=tests/support python tests/campaigns/chaos.py --minutes 10 --seed 1

After each relaunch: all ranks restored the same step, none older than the newest that any rank saw committed, and
bit for bit what a run that nothing interrupts has at that step. At the end: the same final state.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import chaos_report
from chaos_launch import DAMAGED, FAILED, WRONG, Attacked, Failure
from chaos_plan import (
    COURIER,
    EARLY_LOSE,
    FLIP,
    KILL,
    LOSE,
    POWER,
    STOP,
    STOP_KILL,
    TRAINER,
    UNCOVERED,
    ZYGOTE,
    Event,
    Memory,
    event,
)
from chaos_training import Uninterrupted
from harness import COURIER as USUAL
from harness import Cluster
from waiting import take

EVERY = 10  # steps between two saves
TIMEOUT_S = 10.0  # of the Checkpointer: some stops are longer; a busy machine does not take so long
PACE_S = 0.003  # what a step sleeps, as if a device computed
START_S = 90.0  # a launch must be restored by then, on a machine with more ranks than cores
CATCH_UP_S = 45.0


class Chaos:
    """A job under attack.

    Args:
        seed: of what is done to it.
        ranks: number of ranks.
        ranks_per_node: ranks on each emulated node.
        transport: p2p or rma.
        redundancy: the scheme.
        root: directory in memory, of this run's own.
    """

    def __init__(self, seed: int, ranks: int, ranks_per_node: int, transport: str, redundancy: str, root: Path):
        self.seed, self.ranks, self.redundancy = seed, ranks, redundancy
        self.cluster = Cluster(root, ranks_per_node, transport=transport)
        self.memory = Memory(ranks, ranks_per_node, redundancy)
        self.truth = Uninterrupted(ranks, EVERY)
        self.account = chaos_report.Account()
        self.usual_start_s = 3.0
        self.due: list[chaos_report.Row] = []  # events whose loss is known at the next restore
        self.reached = 0

    def run(self, seconds: float) -> None:
        """Attack for so long, then let the job run to its end and compare."""
        end = time.monotonic() + seconds
        job: Attacked | None = None
        number = 0
        while time.monotonic() < end:
            job = job or self.start()
            number += 1
            job = self.attack(job, event(self.seed, number, self.ranks, self.usual_start_s, USUAL))
        self.finish(job or self.start())

    def start(self) -> Attacked:
        given = {"every": EVERY, "timeout_s": TIMEOUT_S, "pace_s": PACE_S, "redundancy": self.redundancy}
        job = Attacked(self.cluster, self.ranks, json.dumps(given))
        self.account.launches += 1
        return job

    def attack(self, job: Attacked, what: Event) -> Attacked | None:
        """Do one thing to the job; returns it where it still lives."""
        if what.during_start:
            take(max(0.0, job.started + what.delay_s - time.monotonic()))
        else:
            job.until("first step", lambda: len(job.of("first step")) == self.ranks, START_S)
            self.usual_start_s = job.of("first step")[0]["at"] - time.time() + time.monotonic() - job.started
            job.pause(what.delay_s)
            if what.after_save_s is not None:
                job.until_save(what.rank, EVERY)
                take(what.after_save_s)
        self.refuse_complaints(job)
        if what.kind in (STOP, COURIER, ZYGOTE):
            self.disturb(job, what)
            return job
        kind, hit = what.kind, {what.rank}
        node = self.memory.node(what.rank)
        nodes = self.memory.uncovered(node) if kind == UNCOVERED else {node}
        whole = job.whole() is not None
        if kind == UNCOVERED or (kind in (LOSE, POWER, EARLY_LOSE) and self.memory.covers(nodes, whole)):
            hit = {rank for node in nodes for rank in self.memory.ranks_on[node]}
        else:
            nodes = set()
            kind = KILL if kind in (LOSE, POWER, EARLY_LOSE) else kind
        if kind in (POWER, FLIP, UNCOVERED):
            hit = set(range(self.ranks))
        if kind == STOP_KILL:
            job.signal(hit, signal.SIGSTOP)
            take(what.stop_s)
        if kind == TRAINER:
            job.kill_part(what.rank, "trainer")
        else:
            hit = job.die(hit)
        if USUAL == "process":
            job.end_trainers()
        for path in [self.cluster.node(lost) for lost in nodes]:
            if path.exists():  # a launch that was killed early may not have made it
                shutil.rmtree(path)
        job.end()
        row = chaos_report.Row(kind, sorted(hit), nodes)
        self.look_back(job, nodes)
        if kind == FLIP and not self.memory.broken and not self.memory.lost:
            row.detail = self.flip(what)
        self.account.killed(job, row, self.reached, self.memory)
        self.due.append(row)
        return None

    def look_back(self, job: Attacked, lost: set[int]) -> None:
        """Check what a launch that ended has restored, and note what memory must give from now on."""
        if restored := self.check_restored(job):
            first = [record["at"] for record in job.of("first step")]
            self.account.restored(job, self.due, restored[0]["step"], max(first, default=None))
            self.due = []
            self.reached = max(job.reached(), restored[0]["step"] or 0)
        if (step := job.whole()) is not None:
            self.memory.keep(step)
        self.memory.lose(lost)

    def check_restored(self, job: Attacked) -> list[dict]:
        restored = job.of("restored")
        steps = {record["step"] for record in restored}
        refused = {str(record["reasons"]) for record in job.of("unrestorable")}
        if refused and (len(refused) > 1 or self.memory.promised is not None or refused == {"{}"}):
            raise job.failure(f"the ranks were refused for these reasons: {refused}; promised: {self.memory.promised}")
        if len(steps) > 1:
            raise job.failure(f"the ranks restored different steps: {steps}")
        for step in steps:
            promised = self.memory.promised
            if promised is not None and (step is None or step < promised):
                raise job.failure(f"restored {step}, but step {promised} was whole and its loss is covered")
            right = self.truth.digests(step or 0)
            for record in restored:
                if (record["of_step"], record["digest"]) != (step or 0, right[record["rank"]]):
                    raise job.failure(f"rank {record['rank']} restored wrong bits for step {step}")
        if job.of("failed") and not self.account.stops_in(job):
            raise job.failure("saves failed, though nobody was stopped")
        return restored

    def disturb(self, job: Attacked, what: Event) -> None:
        """Stop a rank for a while, or kill its courier; the job must go on and commit again."""
        before = job.reached()
        if what.kind == STOP:
            job.signal({what.rank}, signal.SIGSTOP)
            job.pause(what.stop_s)
        else:
            job.kill_part(what.rank, "courier" if what.kind == COURIER else "zygote")
        at, stopped_at = job.reached(), time.monotonic()
        job.signal({what.rank}, signal.SIGCONT)
        job.until(f"a commit after: {what.kind}", lambda: (job.committed() or 0) > at, CATCH_UP_S)
        self.account.stopped(job, what, before, at, time.monotonic() - stopped_at)

    def flip(self, what: Event) -> str:
        """Flip one bit of one slot file; its node counts as broken until the next heal or commit."""
        file_share, place, bit = what.spot
        files = self.cluster.slot_files()
        path = files[int(file_share * len(files))]
        at = int(place * path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))
        self.memory.lose({int(path.parent.name.removeprefix("node"))})
        return f"bit {bit} of byte {at} of {path.parent.name}/{path.name}"

    def refuse_complaints(self, job: Attacked) -> None:
        """Before anything is done to a launch its log must be free of what only a fault explains."""
        log = job.log()
        for text in WRONG:
            if text in DAMAGED and self.memory.broken:  # a bit was flipped: mlflash says so
                continue
            if text == FAILED and self.account.stops_in(job):  # MPI of one courier raises as another was killed
                continue
            if text in log:
                raise job.failure(f"{text!r} is in its log")

    def finish(self, job: Attacked) -> None:
        """Let the job run to its end, and compare every rank's state with the uninterrupted run's."""
        job.until("first step", lambda: len(job.of("first step")) == self.ranks, START_S)
        job.until("a commit", lambda: job.committed() is not None, CATCH_UP_S)
        (job.out / "finish").touch()
        job.until("the end", lambda: len(job.of("end")) == self.ranks, START_S)
        result = job.launch.wait(START_S)
        self.look_back(job, set())
        ends = result.of("end")
        step = ends[0]["step"]
        if result.returncode != 0 or {end["step"] for end in ends} != {step}:
            raise job.failure(f"the last launch ended with {result.returncode} at {[end['step'] for end in ends]}")
        if job.committed() != step:
            raise job.failure(f"the last step {step} was not committed, but {job.committed()}")
        if [end["digest"] for end in ends] != self.truth.digests(step):
            raise job.failure(f"the final state at step {step} is not that of an uninterrupted run")
        self.account.final_step, self.account.equal = step, True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--transport", choices=("p2p", "rma"), default="p2p")
    parser.add_argument("--redundancy", default="copy")
    parser.add_argument("--json", type=Path, help="file for the summary")
    given = parser.parse_args()
    if given.ranks <= given.ranks_per_node:
        parser.error("there must be two nodes or more: a single one has no copies")
    root = Path(tempfile.mkdtemp(prefix="mlflash-chaos-", dir="/dev/shm"))
    chaos = Chaos(given.seed, given.ranks, given.ranks_per_node, given.transport, given.redundancy, root)
    failure = ""
    try:
        chaos.run(60 * given.minutes)
    except Failure as problem:
        failure = str(problem)
        print(failure, file=sys.stderr)
    finally:
        shutil.rmtree(root)
    print(chaos.account.table(), flush=True)
    if given.json is not None:
        options = {"seed": given.seed, "ranks": given.ranks, "ranks_per_node": given.ranks_per_node,
                   "transport": given.transport, "redundancy": given.redundancy}  # fmt: skip
        summary = {**options, **chaos.account.summary(), "failure": failure.partition("\n")[0]}
        given.json.write_text(json.dumps(summary, indent=2) + "\n")
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
