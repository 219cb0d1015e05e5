"""Each rank and each node dies at each named point; the relaunched job restores exactly the step it must.

Here couriers are threads; test_courier_points.py has those that are processes.
`make faults` runs a pairwise sample of the matrix, of which CI takes a share (tests/share.py), `make faults-full` all.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from harness import Cluster, Result, train_and_die

from mlflash.crash_points import POINTS
from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.survival import of
from mlflash.placement.topology import from_node_ids

ORDER = [point for point in POINTS if not point.startswith(("drain.", "lazy.", "mend.", "round."))]  # elsewhere
SAVE = [p for p in ORDER if p.split(".")[0] in ("stage", "protect", "commit")]
ROOM = ["room.begun", "room.created"]
RESTORE = [p for p in ORDER if p.split(".")[0] in ("restore", "heal") and p != "restore.resharded"]
TRANSFER = [p for p in ORDER if p.startswith("transfer.")]
PARITY = [p for p in ORDER if p.startswith("parity.")]
AT_HOME = [p for p in RESTORE if p not in ("restore.fetched", "restore.rebuilt", "heal.copied")]
FETCHED = [p for p in RESTORE if p != "restore.rebuilt"]
REBUILT = [p for p in RESTORE if p != "restore.fetched"]
SECOND_SAVE_SEEN = ("commit.seen", "commit.seen")
SECOND_SAVE_RELEASED = ("commit.released", "commit.released")  # which nobody knows before it is
SHARE = [p for p in ORDER if p.startswith("share.")]
SCHEMES = ["copy", "xor:3", "rs:2+2", "alike"]  # the last is copy, with most of the state the same on all ranks
LAYOUTS = [(2, 1), (3, 1), (4, 2), (4, 1)]  # ranks, ranks per node
LEAST_NODES = {"copy": 2, "alike": 2, "xor:3": 3, "rs:2+2": 4}

# What happens before, as nodes wiped and moved, and the points passed before the one where the crash is.
SCENARIOS: dict[str, tuple[tuple[int, ...], bool, tuple[str, ...]]] = {
    "first save": ((), False, ()),
    "third save": ((), False, SECOND_SAVE_SEEN),
    "save while the next is staged": ((), False, SECOND_SAVE_SEEN),
    "save that grew": ((), False, SECOND_SAVE_SEEN),
    "save after a restore": ((), False, ("heal.done",)),
    "save after a lost node": ((0,), False, ("heal.done",)),
    "restore": ((), False, ()),
    "restore of a lost node": ((0,), False, ()),
    "heal of a lost node": ((0,), False, ("heal.begun",)),
    "restore of moved ranks": ((), True, ()),
    "heal of moved ranks": ((), True, ("heal.begun",)),
}


def points_of(scenario: str, scheme: str) -> list[str]:
    """The points that are passed in a scenario, where it crashes."""
    copies = scheme in ("copy", "alike")
    moves = TRANSFER if copies else PARITY
    if scheme.startswith("xor") and scenario != "restore of a lost node":  # who codes the only parity keeps it
        moves = [point for point in PARITY if point != "parity.arrived"]
    save = SAVE + moves + (SHARE if scheme == "alike" else [])
    return {
        "first save": save + ROOM,
        "save that grew": save + ROOM,
        "restore": AT_HOME,
        "restore of a lost node": (FETCHED if copies else REBUILT) + moves,
        "heal of a lost node": moves,
        "restore of moved ranks": FETCHED + TRANSFER,
        "heal of moved ranks": moves,
    }.get(scenario, save)


# Small chunks, so that there is a middle of a transfer.
CHUNKS = {"MLFLASH_BLOCK_NBYTES": "65536", "MLFLASH_CHUNK_NBYTES": "65536"}


@dataclasses.dataclass(frozen=True)
class Case:
    scenario: str
    point: str
    dies: str  # rank | node | wipe; trainer | courier, where it is a process: that alone
    who: int  # rank that dies, or whose node does; -1: whoever comes first
    layout: tuple[int, int]
    transport: str
    scheme: str
    courier: str = "thread"  # | process

    def __str__(self) -> str:
        who = "first to come" if self.who < 0 else f"rank {self.who}"
        where = f"{self.layout[0]}x{self.layout[1]}-{self.transport}-{self.scheme}"
        return f"{self.scenario}-{self.point}-{self.dies} of {who}-{where}"

    @property
    def exists(self) -> bool:
        # On two nodes each has a slot of every rank; of three, two may change places and still have one.
        far_enough = self.layout == (4, 1) or self.scheme in ("xor:3", "rs:2+2") or not SCENARIOS[self.scenario][1]
        passed = self.point in points_of(self.scenario, self.scheme)
        return passed and self.who < self.layout[0] and far_enough and _enough_nodes(self.layout, self.scheme)

    @property
    def goes_on(self) -> bool:
        """Whether training does: only the courier dies, and in no call but a save. A restore raises, which makes room
        for the first save, too.
        """
        in_restore = self.scenario.startswith("restore") or (self.scenario == "first save" and self.point in ROOM)
        return self.dies == "courier" and not in_restore

    @property
    def path(self) -> list[str]:
        """The points that lead to the crash. A save is staged while the heal still runs, and as soon as the one before
        is known to be committed: what its courier does last may come later.
        """
        before = SCENARIOS[self.scenario][2]
        if self.point.startswith("stage"):
            before = {("heal.done",): ("restore.loaded",), SECOND_SAVE_SEEN: SECOND_SAVE_RELEASED}.get(before, before)
        return [*before, self.point]


def cases(courier: str) -> list[Case]:
    """The cases of one kind of courier."""
    scenarios, points = list(SCENARIOS), [p for p in ORDER if p != "restore.resharded"]  # see test_other_ranks
    dies, who, transports = ["rank", "node", "wipe"], [-1, 0, 1, 2, 3], ["p2p", "rma"]
    if courier == "process":
        dies += ["trainer", "courier"]
    parameters = [scenarios, points, dies, who, LAYOUTS, transports, SCHEMES, [courier]]
    if os.environ.get("MLFLASH_FAULTS") == "full":
        return [case for case in itertools.starmap(Case, itertools.product(*parameters)) if case.exists]
    # The pairs of point and scenario alone would be as many as the sample should have: each point is in several
    # scenarios, each scenario has several points, and every pair of anything else is there.
    sample = []
    for index, row in enumerate(AllPairs(parameters[1:-1], filter_func=_fits)):
        possible = [case for s in scenarios if (case := Case(s, *row, courier)).exists]
        sample.append(possible[index % len(possible)])
    return sample + _missed(sample, parameters)


def _missed(sample: list[Case], parameters: list[list[Any]]) -> list[Case]:
    """A case for each point and way to die that the sample has not together: it stops before it has them all."""
    there = {(case.point, case.dies) for case in sample}
    missed = []
    for point, dies in itertools.product(*parameters[1:3]):
        rows = itertools.product(parameters[0], [point], [dies], *parameters[3:])
        possible = [case for case in itertools.starmap(Case, rows) if case.exists]
        if (point, dies) not in there and possible:
            missed.append(possible[len(possible) * (7 * len(missed) % 41) // 41])
    return missed


def _fits(row: list[Any]) -> bool:
    """Whether the values chosen so far, in the order of the parameters, go together."""
    if len(row) >= 4 and row[2] >= row[3][0]:
        return False
    return len(row) < 6 or any(Case(scenario, *row).exists for scenario in SCENARIOS)


def _enough_nodes(layout: tuple[int, int], scheme: str) -> bool:
    return layout[0] // layout[1] >= LEAST_NODES[scheme]


def state_of(scheme: str) -> dict[str, Any]:
    """What a worker is told of its state."""
    alike = scheme == "alike"
    return {"alike": alike, "options": {"redundancy": "copy" if alike else scheme}}


def steps_allowed(case: Case, gone: set[int]) -> set[int | None]:
    """The steps that the relaunch may restore; where the promise leaves no choice, one.

    Args:
        gone: nodes whose memory went in the crash.
    """
    wiped, moved, _ = SCENARIOS[case.scenario]
    if case.goes_on:
        return {last_of(case)}
    healing = case.path[0] == "restore.loaded"  # not seen to its end
    if "save" in case.scenario and not healing:
        if case.scenario == "save while the next is staged":
            return set(range(3 if case.point.startswith("commit") else 2, 10))
        older = {"first save": None, "third save": 2, "save that grew": 2}.get(case.scenario, 3)
        newer = (older or 0) + 1
        if case.point.startswith("commit"):
            return {newer}
        if case.dies == "trainer" and not case.point.startswith("stage"):
            # All ranks have posted their saves by then, and couriers bring to its end what they were handed. A save
            # that waits until there is room is handed over only when that is there.
            return {newer} if case.scenario == "third save" else {older, newer}
        # The others may have sealed theirs, and so may this rank, once it is past its sending.
        sealed = case.point in ("transfer.arrived", "transfer.received", "transfer.sealed", "parity.received",
                                "parity.sealed", "protect.sealed")  # fmt: skip
        return {older, newer} if sealed else {older}
    ranks, per_node = case.layout
    node_of = [rank // per_node for rank in range(ranks)]
    topology = from_node_ids([(node * per_node, f"node{node}") for node in node_of])
    lost = set() if moved else gone | set(wiped)  # a move takes own slot and copy of a rank to two other nodes
    covered = of(topology, place(topology, parse(state_of(case.scheme)["options"]["redundancy"]))).survives(lost)
    if covered or case.point in ("heal.copied", "heal.freed", "heal.done"):
        return {3}
    # -1: checkpoints are there, and none can be restored. Where each node was lost once nothing says so any more, but
    # what had come to one of them again.
    early = case.point in ("restore.listed", "restore.verified", "restore.adopted")
    if len(lost) == len(topology.node_names):
        return {None} if early else {None, -1, 3}
    return {-1} if early else {-1, 3}


def last_of(case: Case) -> int:
    """The last step of a training that goes on: it saves twice more than what was on its way, or was to be the next."""
    older = {"first save": 0, "third save": 2, "save that grew": 2}.get(case.scenario, 3)
    return 9 if case.scenario == "save while the next is staged" else older + 3


@pytest.mark.in_thread
@pytest.mark.parametrize("case", cases("thread"), ids=str)
def test_the_relaunch_restores_exactly_what_it_must(shm: Path, case: Case) -> None:
    crash_and_relaunch(shm, case)


def crash_and_relaunch(shm: Path, case: Case) -> None:
    """Let a job crash as a case says, and the next one go on; what it finds must be what it may find."""
    ranks, per_node = case.layout
    wiped, moved, before = SCENARIOS[case.scenario]
    if "restore" in case.scenario or "heal" in case.scenario or "after" in case.scenario:
        train_and_die(Cluster(shm, per_node), ranks, 3, CHUNKS, **state_of(case.scheme))
    cluster = Cluster(shm, per_node, transport=case.transport)
    cluster.wipe(*wiped)
    if moved:
        cluster.move({0: 1, 1: 0})
    state = state_of(case.scheme)
    if case.scenario == "save that grew":
        state |= {"grow_at": 3, "load": True}
    in_a_row = case.scenario == "save while the next is staged"
    is_seen = (before or case.path)[0] == "commit.seen"
    steps = {"last": 9 if in_a_row else 3} if is_seen else {"more": int("save" in case.scenario)}
    if case.goes_on:
        steps = {"last": last_of(case)}
        state = {**state, "goes_on": True, "strict": False}
    trap = {"path": case.path, "action": case.dies, "rank": case.who}
    spec = {**state, **steps, "one_by_one": not in_a_row, "traps": [trap]}
    job = cluster.start(ranks, "support/worker.py", json.dumps(spec), env=CHUNKS)
    crashed = job.wait()
    sprung = any(job.out.glob("sprung*"))
    assert sprung or (case.who >= 0 and not steps.get("last") and not steps.get("more")), crashed.log
    if case.goes_on and sprung:
        assert_it_went_on(case, crashed)
    else:
        assert len(crashed.of("end")) < ranks or not sprung, crashed.log

    gone = {node for node in range(ranks // per_node) if not cluster.node(node).exists()}
    assert gone <= (set(range(ranks // per_node)) if case.dies == "wipe" else set())
    state = {name: value for name, value in state.items() if name not in ("goes_on", "strict")}
    result = cluster.run(ranks, "support/worker.py", json.dumps({**state, "more": 1}), env=CHUNKS)
    restored = result.of("restored") or [{"step": -1, **told} for told in result.of("unrestorable")]
    found = {r["step"] for r in restored}
    assert len(restored) == ranks and len(found) == 1, result.log
    assert [r["wrong"] for r in restored] == [[]] * ranks, "bits differ"
    assert found <= steps_allowed(case, gone), crashed.log + result.log
    start = found.pop()
    if start == -1:
        assert not crashed.of("committed"), "a committed step was lost"
        return
    assert (start or 0) >= max((r["step"] for r in crashed.of("committed")), default=0), "a committed step was lost"
    assert len(result.of("end")) == ranks, result.log
    assert {r["steps"][-1] for r in result.of("end")} == {(start or 0) + 1}
    # Nothing piles up: two own slots, two of another rank, two shares and a pulse for each rank, the lock of each node.
    each = 6 if case.scheme == "alike" else 4
    assert len(cluster.slot_files()) == each * ranks
    files = [f for f in cluster.node(0).parent.rglob("*") if f.is_file() and f.parent.name.startswith("node")]
    assert len(files) == (each + 1) * ranks + ranks // per_node


def assert_it_went_on(case: Case, crashed: Result) -> None:
    """A courier that dies costs the saves that are on their way, the same ones on all ranks, and no process more."""
    assert crashed.returncode == 0 and len(crashed.of("end")) == case.layout[0], crashed.log
    assert "died, and training goes on" in crashed.log
    assert {r["steps"][-1] for r in crashed.of("end")} == {last_of(case)}, crashed.log
    failed = {(r["rank"], r["step"]) for r in crashed.of("failed")}
    steps = {step for _, step in failed}
    assert len(steps) <= (2 if case.scenario == "save while the next is staged" else 1), crashed.log
    assert failed == {(rank, step) for rank in range(case.layout[0]) for step in steps}, crashed.log
