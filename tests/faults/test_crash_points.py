"""Each rank and each node dies at each named point; the relaunched job restores exactly the step it must.

`make faults` runs a pairwise sample of the matrix, `make faults-full` all of it; with MLFLASH_FAULTS_STRIDE=n every
n-th case.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from allpairspy import AllPairs
from harness import Cluster

from mlflash.points import POINTS
from mlflash.topology import from_node_ids, partners

ORDER = list(POINTS)
SAVE = [p for p in ORDER if p.split(".")[0] in ("stage", "protect", "transfer", "commit")]
ROOM = ["room.removed", "room.created"]
RESTORE = [p for p in ORDER if p.split(".")[0] in ("restore", "heal")]
TRANSFER = [p for p in ORDER if p.startswith("transfer.")]
AT_HOME = [p for p in RESTORE if p not in ("restore.fetched", "heal.copied")]
SECOND_SAVE_SEEN = ("commit.seen", "commit.seen")

# What happens before, as nodes wiped and moved; the points passed before the one where the crash is; those points.
SCENARIOS: dict[str, tuple[tuple[int, ...], bool, tuple[str, ...], list[str]]] = {
    "first save": ((), False, (), SAVE + ROOM),
    "third save": ((), False, SECOND_SAVE_SEEN, SAVE),
    "save while the next is staged": ((), False, SECOND_SAVE_SEEN, SAVE),
    "save that grew": ((), False, SECOND_SAVE_SEEN, SAVE + ROOM),
    "save after a restore": ((), False, ("heal.done",), SAVE),
    "save after a lost node": ((0,), False, ("heal.done",), SAVE),
    "restore": ((), False, (), AT_HOME),
    "restore of a lost node": ((0,), False, (), RESTORE + TRANSFER),
    "heal of a lost node": ((0,), False, ("heal.begun",), TRANSFER),
    "restore of moved ranks": ((), True, (), RESTORE + TRANSFER),
    "heal of moved ranks": ((), True, ("heal.begun",), TRANSFER),
}
LAYOUTS = [(2, 1), (3, 1), (4, 2), (4, 1)]  # ranks, ranks per node
# Small chunks, so that there is a middle of a transfer.
CHUNKS = {"MLFLASH_BLOCK_NBYTES": "65536", "MLFLASH_CHUNK_NBYTES": "65536"}


@dataclasses.dataclass(frozen=True)
class Case:
    scenario: str
    point: str
    dies: str  # rank | node | wipe
    who: int  # rank that dies, or whose node does; -1: whoever comes first
    layout: tuple[int, int]
    transport: str

    def __str__(self) -> str:
        who = "first to come" if self.who < 0 else f"rank {self.who}"
        return f"{self.scenario}-{self.point}-{self.dies} of {who}-{self.layout[0]}x{self.layout[1]}-{self.transport}"

    @property
    def exists(self) -> bool:
        # On two nodes each has a slot of every rank; of three, two may change places and still have one.
        far_enough = self.layout == (4, 1) or not SCENARIOS[self.scenario][1]
        return self.point in SCENARIOS[self.scenario][3] and self.who < self.layout[0] and far_enough

    @property
    def path(self) -> list[str]:
        """The points that lead to the crash. A save is staged while the heal still runs."""
        before = SCENARIOS[self.scenario][2]
        if before == ("heal.done",) and self.point.startswith("stage"):
            before = ("restore.loaded",)
        return [*before, self.point]


def cases() -> list[Case]:
    scenarios, points = list(SCENARIOS), [*ORDER]
    dies, who, transports = ["rank", "node", "wipe"], [-1, 0, 1, 2, 3], ["p2p", "rma"]
    parameters = [scenarios, points, dies, who, LAYOUTS, transports]
    stride = int(os.environ.get("MLFLASH_FAULTS_STRIDE", "1"))
    if os.environ.get("MLFLASH_FAULTS") == "full":
        return [case for case in itertools.starmap(Case, itertools.product(*parameters)) if case.exists][::stride]
    # The pairs of point and scenario alone would be as many as the sample should have: each point is in several
    # scenarios, each scenario has several points, and every pair of anything else is there.
    rows = AllPairs([points, dies, who, LAYOUTS, transports], filter_func=_fits)
    sample = []
    for index, (point, *rest) in enumerate(rows):
        possible = [case for s in scenarios if (case := Case(s, point, *rest)).exists]
        sample.append(possible[index % len(possible)])
    return sample[::stride]


def _fits(row: list[object]) -> bool:
    return len(row) < 4 or row[2] < row[3][0]


class Memories:
    """What jobs left that committed steps 2 and 3 and died: made once for each layout, copied for each case."""

    def __init__(self, root: Path):
        self._root = root
        self._made: dict[tuple[object, ...], Path] = {}

    def give(self, cluster: Cluster, ranks: int) -> None:
        """Copy the memory of such a job into a cluster."""
        key = (ranks, cluster.ranks_per_node)
        if key not in self._made:
            first = Cluster(self._root / f"{ranks}x{cluster.ranks_per_node}", cluster.ranks_per_node)
            first.root.mkdir()
            result = first.run(ranks, "worker.py", json.dumps({"last": 3, "die_at": 3, "die": "all"}), env=CHUNKS)
            assert [r["step"] for r in result.of("committed")].count(3) == ranks, result.log
            self._made[key] = first.root / f"mlflash-{os.getuid()}"
        shutil.copytree(self._made[key], cluster.root / f"mlflash-{os.getuid()}")


@pytest.fixture(scope="module")
def memories() -> Iterator[Memories]:
    root = Path(tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm"))
    yield Memories(root)
    shutil.rmtree(root)


def steps_allowed(case: Case, gone: set[int]) -> set[int | None]:
    """The steps that the relaunch may restore; where the promise leaves no choice, one.

    Args:
        gone: nodes whose memory went in the crash.
    """
    wiped, moved, _, _ = SCENARIOS[case.scenario]
    healing = case.path[0] == "restore.loaded"  # not seen to its end
    if "save" in case.scenario and not healing:
        if case.scenario == "save while the next is staged":
            return set(range(3 if case.point.startswith("commit") else 2, 10))
        older = {"first save": None, "third save": 2, "save that grew": 2}.get(case.scenario, 3)
        newer = (older or 0) + 1
        if case.point.startswith("commit"):
            return {newer}
        # The others may have sealed theirs, and so may this rank, once it is past its sending.
        sealed = case.point in ("transfer.arrived", "transfer.received", "transfer.sealed", "protect.sealed")
        return {older, newer} if sealed else {older}
    ranks, per_node = case.layout
    node_of = [rank // per_node for rank in range(ranks)]
    partner_of = partners(from_node_ids([(node * per_node, f"node{node}") for node in node_of]))
    lost = set() if moved else gone | set(wiped)  # a move takes own slot and copy of a rank to two other nodes
    covered = all({node_of[rank], node_of[partner_of[rank]]} - lost for rank in range(ranks))
    if covered or case.point in ("heal.copied", "heal.freed", "heal.done"):
        return {3}
    return {None} if case.point in ("restore.listed", "restore.verified", "restore.adopted") else {None, 3}


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_relaunch_restores_exactly_what_it_must(shm: Path, memories: Memories, case: Case) -> None:
    ranks, per_node = case.layout
    wiped, moved, _, _ = SCENARIOS[case.scenario]
    cluster = Cluster(shm, per_node, transport=case.transport)
    if "restore" in case.scenario or "heal" in case.scenario or "after" in case.scenario:
        memories.give(cluster, ranks)
    cluster.wipe(*wiped)
    if moved:
        cluster.move({0: 1, 1: 0})
    state = {"grow_at": 3, "load": True} if case.scenario == "save that grew" else {}
    in_a_row = case.scenario == "save while the next is staged"
    steps = {"last": 9 if in_a_row else 3} if case.path[0] == "commit.seen" else {"more": int("save" in case.scenario)}
    trap = {"path": case.path, "action": case.dies, "rank": case.who}
    spec = {**state, **steps, "one_by_one": not in_a_row, "traps": [trap]}
    job = cluster.start(ranks, "worker.py", json.dumps(spec), env=CHUNKS)
    crashed = job.wait(40)
    sprung = any(job.out.glob("sprung*"))
    assert sprung or (case.who >= 0 and not steps.get("last") and not steps.get("more")), crashed.log
    assert len(crashed.of("end")) < ranks or not sprung, crashed.log

    gone = {node for node in range(ranks // per_node) if not cluster.node(node).exists()}
    assert gone <= (set(range(ranks // per_node)) if case.dies == "wipe" else set())
    result = cluster.run(ranks, "worker.py", json.dumps({**state, "more": 1}), timeout=40, env=CHUNKS)
    restored = result.of("restored")
    found = {r["step"] for r in restored}
    assert len(restored) == ranks and len(found) == 1, result.log
    assert [r["wrong"] for r in restored] == [[]] * ranks, "bits differ"
    assert found <= steps_allowed(case, gone), crashed.log + result.log
    start = found.pop()
    assert (start or 0) >= max((r["step"] for r in crashed.of("committed")), default=0), "a committed step was lost"
    assert len(result.of("end")) == ranks, result.log
    assert {r["steps"][-1] for r in result.of("end")} == {(start or 0) + 1}
    # Nothing piles up: two own slots and two of another rank for each rank, and the lock of each node.
    assert len(cluster.slot_files()) == 4 * ranks
    files = [f for f in cluster.node(0).parent.rglob("*") if f.is_file() and f.parent.name.startswith("node")]
    assert len(files) == 4 * ranks + ranks // per_node
