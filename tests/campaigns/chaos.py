"""Kill a training job at random moments, again and again, and hold mlflash to what it promises.

    PYTHONPATH=tests/support python tests/campaigns/chaos.py --minutes 10 --seed 1

After each relaunch: all ranks restored the same step, none older than the newest that any rank saw committed, and
bit for bit the state that a training has at that step: it is known for each rank and step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos_launch import DAMAGED, FAILED, WRONG, Attacked, Failure
from harness import Cluster
from waiting import take

from mlflash.placement.redundancy import parse, place
from mlflash.placement.survival import of
from mlflash.placement.topology import Topology

EVERY = 10  # steps between two saves
TIMEOUT_S = 10.0  # of the Checkpointer: some stops are longer; a busy machine does not take so long
PACE_S = 0.003  # what a step sleeps, as if a device computed
START_S = 90.0  # a launch must be restored by then, on a machine with more ranks than cores
CATCH_UP_S = 45.0
KILL = "kill a rank"
LOSE = "lose a node"
POWER = "lose a node, kill all"
STOP = "stop a rank, go on"
STOP_KILL = "stop a rank, kill it"
EARLY = "kill during the start"
EARLY_LOSE = "lose a node during the start"
FLIP = "kill all, flip a bit"
UNCOVERED = "lose both partners"
TRAINER = "kill a trainer"  # its courier commits what it has
COURIER = "kill a courier, go on"
AGENT = "kill an agent, go on"
_WEIGHTS = {KILL: 14, LOSE: 18, POWER: 14, STOP: 14, STOP_KILL: 8, EARLY: 10, EARLY_LOSE: 12, FLIP: 10, UNCOVERED: 3,
            TRAINER: 14, COURIER: 14, AGENT: 6}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing to do to the job.

    Args:
        kind: one of the names above.
        rank: whom it hits; a node is lost with all its ranks.
        delay_s: after the start of the launch where it is to hit the start, else after its first step.
        after_save_s: wait then for the rank's next save, and for so long into it, seconds; None: do not.
        stop_s: how long the rank is stopped, seconds.
        spot: where a bit flips: file and place in it, as fractions.
    """

    kind: str
    rank: int
    delay_s: float
    after_save_s: float | None
    stop_s: float
    spot: tuple[float, float, int]

    @property
    def during_start(self) -> bool:
        return self.kind in (EARLY, EARLY_LOSE)


def event(seed: int, number: int, ranks: int, start_s: float) -> Event:
    """Draw an event: the same for the same seed and number, whatever happened before.

    Args:
        start_s: how long a launch takes to its first step, seconds; those that hit the start come within it.
    """
    dice = random.Random(f"{seed}/{number}")
    kind = dice.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    rank, share = dice.randrange(ranks), dice.random()
    # Half of those that hit the start come late in it: that is where slots are fetched and copies are made again.
    late = dice.random() < 0.5
    delay_s = start_s * (0.8 + 0.4 * share if late else 1.1 * share)
    if kind not in (EARLY, EARLY_LOSE):
        delay_s = share * (0.1 if dice.random() < 0.25 else 4.0)
    stop_s = dice.uniform(2, 20) if kind == STOP else dice.uniform(0, 15)
    after_save_s = dice.choice((None, dice.uniform(0, 0.01), dice.uniform(0, 0.1)))
    return Event(kind, rank, delay_s, after_save_s, stop_s, (dice.random(), dice.random(), dice.randrange(8)))


class Memory:
    """What the nodes' memory must give, as far as the driver can know it.

    Args:
        ranks: number of ranks.
        ranks_per_node: ranks on each node.
        redundancy: the scheme.

    Attributes:
        nodes: number of nodes.
        broken: nodes that lost something since all slots and copies were known to be in place.
        promised: the newest step that must be restored, if not a newer one; None where nothing is promised.
        lost: whether more was lost than is covered, so that it may be told that nothing can be restored.
    """

    def __init__(self, ranks: int, ranks_per_node: int, redundancy: str = "copy"):
        node_of = tuple(rank // ranks_per_node for rank in range(ranks))
        self.nodes = node_of[-1] + 1
        topology = Topology(node_of, tuple(f"node{node}" for node in range(self.nodes)))
        self.ranks_on = topology.ranks_on
        placement = place(topology, parse(redundancy))
        self._survival = of(topology, placement)
        self._group = {node: group for group in placement.node_groups for node in group}
        self.broken: set[int] = set()
        self.promised: int | None = None
        self.lost = False

    def node(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.ranks_on) if rank in ranks)

    def uncovered(self, node: int) -> set[int]:
        """A node and as many of its group as may not be lost with it."""
        lost = [node]
        for other in self._group[node]:
            if self._survival.survives(lost) and other != node:
                lost.append(other)
        return set(lost)

    def covers(self, nodes: set[int], whole: bool = False) -> bool:
        """Whether these nodes may be lost too: every slot is still somewhere, or can be rebuilt.

        Args:
            whole: a step was seen in all its places since.
        """
        return self._survival.survives(nodes if whole else self.broken | nodes) and (whole or not self.lost)

    def keep(self, step: int) -> None:
        self.broken, self.promised, self.lost = set(), step, False

    def lose(self, nodes: set[int]) -> None:
        if not self.covers(nodes):
            self.lost, self.promised = True, None
        self.broken |= nodes


@dataclasses.dataclass
class Outcome:
    """What came of an event.

    Attributes:
        kind: of it.
        reached: the last step before a kill.
        killed_at: when that was.
        steps_lost: by it; None: the launch had not got so far as to lose anything, or nobody was killed.
        seconds: from the kill to the first new step, or from the end of what goes on to the next commit.
    """

    kind: str
    reached: int = 0
    killed_at: float = 0.0
    steps_lost: int | None = None
    seconds: float | None = None


class Chaos:
    """A job under attack, which a seed decides."""

    def __init__(self, seed: int, ranks: int, ranks_per_node: int, transport: str, redundancy: str, root: Path):
        self.seed, self.ranks, self.redundancy = seed, ranks, redundancy
        self.cluster = Cluster(root, ranks_per_node, transport=transport)
        self.memory = Memory(ranks, ranks_per_node, redundancy)
        self.outcomes: list[Outcome] = []
        self.due: list[Outcome] = []  # whose loss is known at the next restore
        self.disturbed: set[int] = set()  # launches in which a rank was stopped or its courier killed: saves may fail
        self.usual_start_s = 3.0
        self.reached = 0
        self.began = time.monotonic()

    def run(self, seconds: float) -> None:
        """Attack for so long, then let the job run to its end and compare."""
        end = time.monotonic() + seconds
        job: Attacked | None = None
        number = 0
        while time.monotonic() < end:
            job = job or self.start()
            number += 1
            job = self.attack(job, event(self.seed, number, self.ranks, self.usual_start_s))
        self.finish(job or self.start())

    def start(self) -> Attacked:
        given = {"every": EVERY, "timeout_s": TIMEOUT_S, "pace_s": PACE_S, "redundancy": self.redundancy}
        return Attacked(self.cluster, self.ranks, json.dumps(given))

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
        if what.kind in (STOP, COURIER, AGENT):
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
        job.end_trainers()
        for path in [self.cluster.node(lost) for lost in nodes]:
            if path.exists():  # a launch that was killed early may not have made it
                shutil.rmtree(path)
        job.end()
        self.look_back(job, nodes)
        detail = f"; memory of nodes {sorted(nodes)} wiped" if nodes else ""
        if kind == FLIP and not self.memory.broken and not self.memory.lost:
            detail = f"; {self.flip(what)}"
        outcome = Outcome(kind, self.reached, job.killed_at)
        self.outcomes.append(outcome)
        self.due.append(outcome)
        self.say(job, f"{kind}: ranks {sorted(hit)}{detail} | step {self.reached}, committed {job.committed()}, "
                      f"promised: {self.memory.promised}")  # fmt: skip
        return None

    def look_back(self, job: Attacked, lost: set[int]) -> None:
        """Check what a launch that ended has restored, and note what memory must give from now on."""
        if restored := self.check_restored(job):
            step, first = restored[0]["step"], [record["at"] for record in job.of("first step")]
            for outcome in self.due:
                outcome.seconds = max(first) - outcome.killed_at if first else None
            if self.due:  # the others hit launches that had not got so far as to lose anything
                self.due[0].steps_lost = max(0, self.due[0].reached - (step or 0))
            self.due = []
            self.reached = max(job.reached(), step or 0)
            self.say(job, f"restored {step} on {len(restored)} ranks, bits right")
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
            for record in restored:
                if record["of_step"] != (step or 0) or record["wrong"]:
                    raise job.failure(f"rank {record['rank']} restored wrong bits for step {step}")
        if job.of("failed") and job.number not in self.disturbed:
            raise job.failure("saves failed, though nobody was stopped")
        return restored

    def disturb(self, job: Attacked, what: Event) -> None:
        """Stop a rank for a while, or kill its courier; the job must go on and commit again."""
        before = job.reached()
        if what.kind == STOP:
            job.signal({what.rank}, signal.SIGSTOP)
            job.pause(what.stop_s)
        else:
            job.kill_part(what.rank, "courier" if what.kind == COURIER else "agent")
        at, stopped_at = job.reached(), time.monotonic()
        job.signal({what.rank}, signal.SIGCONT)
        job.until(f"a commit after: {what.kind}", lambda: (job.committed() or 0) > at, CATCH_UP_S)
        seconds = time.monotonic() - stopped_at
        self.disturbed.add(job.number)
        self.outcomes.append(Outcome(what.kind, seconds=seconds))
        late = ", past the deadline" if "is late" in job.log() else ""
        self.say(job, f"{what.kind}: rank {what.rank}, from step {before} to {at}{late} | commit {seconds:.1f} s after")

    def flip(self, what: Event) -> str:
        """Flip one bit of one slot file; its node counts as broken until the next reprotect or commit."""
        file_share, place, bit = what.spot
        files = self.cluster.slot_files()
        path = files[int(file_share * len(files))]
        at = int(place * path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))
        (node, *_) = path.relative_to(self.cluster.root).parts
        self.memory.lose({int(node.removeprefix("node"))})
        return f"bit {bit} of byte {at} of {node}/{path.name}"

    def refuse_complaints(self, job: Attacked) -> None:
        """Before anything is done to a launch its log must be free of what only a fault explains."""
        log = job.log()
        for text in WRONG:
            if text in DAMAGED and self.memory.broken:  # a bit was flipped: mlflash says so
                continue
            if text == FAILED and job.number in self.disturbed:  # MPI of one courier raises as another was killed
                continue
            if text in log:
                raise job.failure(f"{text!r} is in its log")

    def finish(self, job: Attacked) -> None:
        """Let the job run to its end."""
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
        self.say(job, f"ended at step {step}")

    def say(self, job: Attacked, text: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f} s] launch {job.number}: {text}", flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """For each kind of event how often it was, the steps lost by it, and the seconds that it took."""
    lines = [f"{'event':<30}{'times':>6}{'steps lost: mean':>18}{'most':>8}{'seconds: mean':>15}{'most':>7}"]
    for kind in sorted({outcome.kind for outcome in outcomes}):
        those = [outcome for outcome in outcomes if outcome.kind == kind]
        cells = []
        for values in ([one.steps_lost for one in those], [one.seconds for one in those]):
            known = [value for value in values if value is not None]
            cells += [f"{statistics.mean(known):.1f}", f"{max(known):.1f}"] if known else ["-", "-"]
        lines.append(f"{kind:<30}{len(those):>6}{cells[0]:>18}{cells[1]:>8}{cells[2]:>15}{cells[3]:>7}")
    return "\n".join([*lines, "seconds: from a kill to the first new step; where nobody dies, to the next commit"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--transport", choices=("p2p", "rma"), default="p2p")
    parser.add_argument("--redundancy", default="copy")
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
    print(table(chaos.outcomes), flush=True)
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
