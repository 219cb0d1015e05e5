"""Kill a training job at random moments, again and again, and hold mlflash to what it promises.

    PYTHONPATH=tests/support python tests/campaigns/chaos.py --minutes 10 --seed 1

After each relaunch: all ranks restored the same step, none older than the newest that any rank saw committed, and
bit for bit the state that a training has at that step: it is known for each rank and step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import damage
import waiting
from harness import Cluster
from processes import is_agent, parent_of, send, state, with_variable
from waiting import take

from mlflash.memory.process_names import trainer_of
from mlflash.placement.redundancy import parse, place
from mlflash.placement.survival import of
from mlflash.placement.topology import Topology

EVERY = 10  # steps between two saves
TIMEOUT_S = 10.0  # of the Checkpointer: some stops are longer; a busy machine does not take so long
PACE_S = 0.003  # what a step sleeps, as if a device computed
START_S = 90.0  # a launch must be restored by then, on a machine with more ranks than cores
CATCH_UP_S = 45.0
END_S = 60.0  # how long mpiexec may take to end what is left of a job
KILL, LOSE, POWER = "kill a rank", "lose a node", "lose a node, kill all"
STOP, STOP_KILL = "stop a rank, go on", "stop a rank, kill it"
EARLY, EARLY_LOSE = "kill during the start", "lose a node during the start"
FLIP, UNCOVERED = "kill all, flip a bit", "lose both partners"
TRAINER = "kill a trainer"  # its courier commits what it has
COURIER, AGENT = "kill a courier, go on", "kill an agent, go on"
WEIGHTS = {KILL: 14, LOSE: 18, POWER: 14, STOP: 14, STOP_KILL: 8, EARLY: 10, EARLY_LOSE: 12, FLIP: 10, UNCOVERED: 3,
           TRAINER: 14, COURIER: 14, AGENT: 6}  # fmt: skip
# What a log must not have, unless a fault explains it.
DAMAGED = ("cannot be restored from", "rebuilt from parity", "parity cannot be used", "is damaged and will be made")
FAILED = "the courier failed"


class Failure(Exception):
    """Something that must not happen did."""


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


def event(seed: int, number: int, ranks: int, start_s: float) -> Event:
    """Draw an event: the same for the same seed and number, whatever happened before.

    Args:
        start_s: how long a launch takes to its first step, seconds; those that hit the start come within it.
    """
    dice = random.Random(f"{seed}/{number}")
    kind = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
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

    Attributes:
        broken: nodes that lost something since all slots and copies were known to be in place.
        promised: the newest step that must be restored, if not a newer one; None where nothing is promised.
        lost: whether more was lost than is covered, so that it may be told that nothing can be restored.
    """

    def __init__(self, ranks: int, ranks_per_node: int, redundancy: str):
        node_of = tuple(rank // ranks_per_node for rank in range(ranks))
        topology = Topology(node_of, tuple(f"node{node}" for node in range(node_of[-1] + 1)))
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


class Attacked:
    """A launch, from its start to the end of its last process."""

    def __init__(self, cluster: Cluster, ranks: int, arguments: str):
        self.number, self.ranks, self.started = cluster.launches + 1, ranks, time.monotonic()
        self.launch = cluster.start(ranks, "campaigns/chaos_worker.py", arguments)
        self.out = self.launch.out
        self.killed_at = 0.0  # unix time

    # What the ranks say

    def of(self, event: str) -> list[dict[str, Any]]:
        return sorted((r for r in self.launch.records() if r["event"] == event), key=lambda r: r["rank"])

    def reached(self) -> int:
        """The last step that any rank has made; 0 where there was none."""
        texts = [path.read_text().strip() for path in self.out.glob("progress*")]
        return max((int(text) for text in texts if text), default=0)

    def committed(self) -> int | None:
        return max((record["step"] for record in self.of("committed")), default=None)

    def whole(self) -> int | None:
        """The newest step that was in place on all nodes: committed, or restored and reprotected on all ranks."""
        if (step := self.committed()) is not None:
            return step
        reprotected = len(self.of("reprotected")) == self.ranks
        return self.of("restored")[0]["step"] if reprotected else None

    def log(self) -> str:
        return (self.out / "log").read_text()

    # Processes

    def processes(self) -> dict[int, int]:
        """All live processes of this launch and the rank that each is; -1 for those of MPI itself.

        They are found by their environment, so also before they have noted anything; but not in the instant in
        which a process is replaced by another program.
        """
        ranks = {}
        for pid in with_variable(f"\0OUT={self.out}\0"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                names = {name: value for name, _, value in (word.partition(b"=") for word in words)}
                if state(Path(f"/proc/{pid}/stat")) not in "ZX":
                    ranks[pid] = int(names.get(b"CHAOS_RANK") or names.get(b"PMI_RANK", -1))
        return ranks

    def kill_part(self, rank: int, part: str) -> None:
        """Kill the trainer, the courier or the agent of a rank, if it is there, and wait until it is dead."""
        pids = {}
        for pid in [pid for pid, owner in self.processes().items() if owner == rank and not is_agent(pid)]:
            is_courier = trainer_of(Path(f"/proc/{pid}")) is not None
            pids["courier" if is_courier else "trainer"] = pid
            if is_courier:
                pids["agent"] = parent_of(pid)
        if part in pids:
            self.killed_at = self.killed_at or (time.time() if part == "trainer" else 0.0)
            send(signal.SIGKILL, [pids[part]])
            waiting.until(lambda: pids[part] not in self.processes(), f"the end of a {part}")

    def alive(self) -> bool:
        return self.launch.running() or bool(self.processes())

    def signal(self, ranks: set[int], number: int) -> None:
        send(number, [pid for pid, rank in self.processes().items() if rank in ranks])

    def die(self, ranks: set[int]) -> set[int]:
        """Kill ranks and wait until they are dead; returns the ranks killed.

        Where one of them has not started yet, mpiexec and all else is killed: it must not start afterwards.
        """
        self.killed_at = self.killed_at or time.time()
        if not ranks <= set(self.processes().values()):
            ranks = {-1, *range(self.ranks)}
            self.launch.kill()
            take(0.1)  # a process that was just being started shows up

        def are_dead() -> bool:
            self.signal(ranks, signal.SIGKILL)
            return not ranks & set(self.processes().values())

        try:
            waiting.until(are_dead, "killed ranks do not die", END_S)
        except AssertionError as problem:
            raise self.failure(str(problem)) from None
        return ranks - {-1}

    def end(self) -> None:
        """Wait until mpiexec has ended the rest of the job; kill what it leaves."""
        self.killed_at = self.killed_at or time.time()
        try:
            waiting.until(lambda: not self.alive(), "the end of all processes", END_S)
        except AssertionError:
            left = self.processes()
            print(f"           launch {self.number}: mpiexec left {len(left)} processes, killed", flush=True)
            self.signal(set(left.values()), signal.SIGKILL)
            waiting.until(lambda: not self.alive(), "the end of what was killed")
        self.launch.kill()  # and what MPI left in /dev/shm

    # Waits

    def until(self, what: str, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is so; that the job ends before it is a failure, too."""
        is_done = False

        def is_decided() -> bool:
            nonlocal is_done
            is_done = done()  # asked once: it may be over a moment later
            return is_done or not self.alive()

        try:
            waiting.until(is_decided, what, timeout_s)
        except AssertionError as problem:
            raise self.failure(str(problem)) from None
        if not is_done and not done():
            raise self.failure(f"the job ended by itself before: {what}")

    def pause(self, seconds: float) -> None:
        """Let the job run for so long; it must not end meanwhile."""
        take(seconds)
        if not self.alive():
            raise self.failure("the job ended by itself")

    def failure(self, what: str) -> Failure:
        """Say what went wrong, with notes, and the log, which has the ranks' stacks; the job is killed."""
        left = self.processes()
        self.signal({rank for rank in left.values() if rank >= 0}, signal.SIGUSR1)
        take(1)  # to write them
        notes = "\n".join(str(r) for r in sorted(self.launch.records(), key=lambda r: r["at"])[-40:])
        text = f"launch {self.number}: {what}\n--- notes\n{notes}\n--- log\n{self.log()[-20000:]}"
        self.signal(set(left.values()), signal.SIGKILL)
        self.launch.kill()
        return Failure(text)


@dataclasses.dataclass
class Outcome:
    """What came of an event.

    Attributes:
        reached, killed_at: the last step before a kill, and when that was.
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
        self.usual_start_s, self.reached, self.began = 3.0, 0, time.monotonic()

    def run(self, seconds: float) -> None:
        """Attack for so long, then let the job run to its end and compare."""
        end, number = time.monotonic() + seconds, 0
        job: Attacked | None = None
        while time.monotonic() < end:
            number += 1
            job = self.attack(job or self.start(), event(self.seed, number, self.ranks, self.usual_start_s))
        self.finish(job or self.start())

    def start(self) -> Attacked:
        spec = {"every": EVERY, "timeout_s": TIMEOUT_S, "pace_s": PACE_S, "redundancy": self.redundancy}
        return Attacked(self.cluster, self.ranks, json.dumps(spec))

    def attack(self, job: Attacked, event: Event) -> Attacked | None:
        """Do one thing to the job; returns it where it still lives."""
        if event.kind in (EARLY, EARLY_LOSE):
            take(max(0.0, job.started + event.delay_s - time.monotonic()))
        else:
            job.until("first step", lambda: len(job.of("first step")) == self.ranks, START_S)
            self.usual_start_s = job.of("first step")[0]["at"] - time.time() + time.monotonic() - job.started
            job.pause(event.delay_s)
            if event.after_save_s is not None:
                progress = job.out / f"progress{event.rank}"
                job.until("a step that is saved", lambda: int(progress.read_text() or 1) % EVERY == 0, END_S)
                take(event.after_save_s)
        self.refuse_complaints(job)
        if event.kind in (STOP, COURIER, AGENT):
            self.disturb(job, event)
            return job
        kind, hit, node = event.kind, {event.rank}, self.memory.node(event.rank)
        nodes = self.memory.uncovered(node) if kind == UNCOVERED else {node}
        is_lost = kind in (LOSE, POWER, EARLY_LOSE) and self.memory.covers(nodes, job.whole() is not None)
        if kind == UNCOVERED or is_lost:
            hit = {rank for node in nodes for rank in self.memory.ranks_on[node]}
        else:
            nodes = set()
            kind = KILL if kind in (LOSE, POWER, EARLY_LOSE) else kind
        if kind in (POWER, FLIP, UNCOVERED):
            hit = set(range(self.ranks))
        if kind == STOP_KILL:
            job.signal(hit, signal.SIGSTOP)
            take(event.stop_s)
        if kind == TRAINER:
            job.kill_part(event.rank, "trainer")
        else:
            hit = job.die(hit)
        for rank in range(self.ranks):
            job.kill_part(rank, "trainer")
        for path in map(self.cluster.node, nodes):
            if path.exists():  # a launch that was killed early may not have made it
                shutil.rmtree(path)
        job.end()
        self.look_back(job, nodes)
        detail = f"; memory of nodes {sorted(nodes)} wiped" if nodes else ""
        if kind == FLIP and not self.memory.broken and not self.memory.lost:
            detail = f"; {self.flip(event)}"
        self.due.append(Outcome(kind, self.reached, job.killed_at))
        self.outcomes.append(self.due[-1])
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

    def check_restored(self, job: Attacked) -> list[dict[str, Any]]:
        restored, promised = job.of("restored"), self.memory.promised
        steps = {record["step"] for record in restored}
        refused = {str(record["reasons"]) for record in job.of("unrestorable")}
        if refused and (len(refused) > 1 or promised is not None or refused == {"{}"}):
            raise job.failure(f"the ranks were refused for these reasons: {refused}; promised: {promised}")
        if len(steps) > 1:
            raise job.failure(f"the ranks restored different steps: {steps}")
        for record in restored:
            if promised is not None and (record["step"] is None or record["step"] < promised):
                raise job.failure(f"restored {steps}, but step {promised} was whole and its loss is covered")
            if record["of_step"] != (record["step"] or 0) or record["wrong"]:
                raise job.failure(f"rank {record['rank']} restored wrong bits for {steps}")
        if job.of("failed") and job.number not in self.disturbed:
            raise job.failure("saves failed, though nobody was stopped")
        return restored

    def disturb(self, job: Attacked, event: Event) -> None:
        """Stop a rank for a while, or kill its courier; the job must go on and commit again."""
        before = job.reached()
        if event.kind == STOP:
            job.signal({event.rank}, signal.SIGSTOP)
            job.pause(event.stop_s)
        else:
            job.kill_part(event.rank, "courier" if event.kind == COURIER else "agent")
        at, stopped_at = job.reached(), time.monotonic()
        job.signal({event.rank}, signal.SIGCONT)
        job.until(f"a commit after: {event.kind}", lambda: (job.committed() or 0) > at, CATCH_UP_S)
        seconds = time.monotonic() - stopped_at
        self.disturbed.add(job.number)
        self.outcomes.append(Outcome(event.kind, seconds=seconds))
        late = ", past the deadline" if "is late" in job.log() else ""
        steps = f"from step {before} to {at}{late} | commit {seconds:.1f} s after"
        self.say(job, f"{event.kind}: rank {event.rank}, {steps}")

    def flip(self, event: Event) -> str:
        """Flip one bit of one slot file; its node counts as broken until the next reprotect or commit."""
        file_share, place, bit = event.spot
        files = self.cluster.slot_files()
        path = files[int(file_share * len(files))]
        at = int(place * path.stat().st_size)
        damage.flip(path, at, bit=1 << bit)
        (node, *_) = path.relative_to(self.cluster.root).parts
        self.memory.lose({int(node.removeprefix("node"))})
        return f"bit {bit} of byte {at} of {node}/{path.name}"

    def refuse_complaints(self, job: Attacked) -> None:
        """Before anything is done to a launch its log must be free of what only a fault explains."""
        log, texts = job.log(), ["has no full redundancy"]
        texts += [] if job.number in self.disturbed else [FAILED]  # MPI of one courier raises as another was killed
        texts += [] if self.memory.broken else DAMAGED  # a bit was flipped: mlflash says so
        for text in texts:
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
        steps = [end["step"] for end in result.of("end")]
        if result.returncode != 0 or len({*steps}) != 1:
            raise job.failure(f"the last launch ended with {result.returncode} at {steps}")
        if job.committed() != steps[0]:
            raise job.failure(f"the last step {steps[0]} was not committed, but {job.committed()}")
        self.say(job, f"ended at step {steps[0]}")

    def say(self, job: Attacked, text: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f} s] launch {job.number}: {text}", flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """For each kind of event how often it was, the steps lost by it, and the seconds that it took."""
    lines = [f"{'event':<30}{'times':>6}{'steps lost: mean':>18}{'most':>8}{'seconds: mean':>15}{'most':>7}"]
    for kind in sorted({outcome.kind for outcome in outcomes}):
        same = [outcome for outcome in outcomes if outcome.kind == kind]
        cells = []
        for values in ([outcome.steps_lost for outcome in same], [outcome.seconds for outcome in same]):
            known = [value for value in values if value is not None]
            cells += [f"{statistics.mean(known):.1f}", f"{max(known):.1f}"] if known else ["-", "-"]
        lines.append(f"{kind:<30}{len(same):>6}{cells[0]:>18}{cells[1]:>8}{cells[2]:>15}{cells[3]:>7}")
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
    chaos, failed = Chaos(given.seed, given.ranks, given.ranks_per_node, given.transport, given.redundancy, root), 0
    try:
        chaos.run(60 * given.minutes)
    except Failure as problem:
        failed = 1
        print(problem, file=sys.stderr)
    finally:
        shutil.rmtree(root)
    print(table(chaos.outcomes), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
