"""A rank, a node, a trainer or a courier dies at a named point; the relaunch restores the step that it must.

test_each_point.py kills at all points, on the fewest ranks. A fixed set of cases has each value of each of these here:
who dies and how (a trainer or a courier alone, too), 1 or 2 ranks on 2, 3 or 4 nodes, both transports, each kind of
scheme, and what happened before: a first, a third, an overlapping save, one that grew, one after a restore or a lost
node, a restore, and one of ranks that have moved.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result, train_and_die

SMALL = {"MLFLASH_TEST_BLOCK_NBYTES": "16384"}  # so that there is a middle of a transfer
THIRD = ("commit.seen", "commit.seen")  # before the third save
HEALED = ("reprotect.done",)


@dataclasses.dataclass(frozen=True)
class Case:
    """What happens, and who dies where.

    Attributes:
        path: the points that lead to the death, the last of them there.
        dies: rank | node | wipe: the node with its memory | trainer | courier: that process alone.
        who: the rank that dies, or whose node does; -1: whoever comes first.
        layout: ranks, ranks per node.
        scheme: of redundancy; "alike": copies, and most of the state is the same on all ranks.
        back: the steps of which the relaunch may restore any.
        train: what `worker.train` is told besides.
        left: whether a job had saved step 3 and died; of its nodes these are lost, these change places.
    """

    name: str
    path: tuple[str, ...]
    dies: str
    who: int
    layout: tuple[int, int]
    transport: str
    scheme: str
    back: Collection[int | None]
    train: dict[str, Any]
    left: bool = False
    lost: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}-{self.path[-1]}-{self.dies} of {self.who}-{self.scheme}"

    @property
    def goes_on(self) -> bool:
        """Whether training does: a courier alone dies, and in a save."""
        return self.dies == "courier"


ONCE, THRICE, IN_A_ROW = {"more": 1}, {"last": 3}, {"last": 9, "one_by_one": False}
GROWS = {"grow_at": 3, "load": True}
CASES = [
    Case("first save", ("share.sealed",), "wipe", 1, (4, 2), "rma", "alike", {None}, THRICE),
    Case("third save", (*THIRD, "commit.agreed"), "node", 1, (4, 2), "rma", "copy", {3}, THRICE),
    # All ranks have posted their saves, and couriers bring to its end what they were handed.
    Case("third save", (*THIRD, "transfer.sent"), "trainer", 1, (4, 2), "p2p", "copy", {3}, THRICE),
    Case("third save", (*THIRD, "commit.recorded"), "courier", 0, (3, 1), "rma", "alike", {5}, {"last": 5}),
    Case("next is staged", (*THIRD, "commit.half_recorded"), "rank", -1, (3, 1), "p2p", "xor:3", range(3, 10),
         IN_A_ROW),
    Case("next is staged", (*THIRD, "transfer.arrived"), "courier", -1, (2, 1), "rma", "copy", {9}, IN_A_ROW),
    Case("grew", (*THIRD, "room.created"), "rank", 1, (2, 1), "rma", "alike", {2}, THRICE | GROWS),
    Case("grew", (*THIRD, "room.begun"), "courier", 1, (2, 1), "p2p", "copy", {5}, {"last": 5} | GROWS),
    Case("after a restore", (*HEALED, "transfer.sent"), "node", 1, (2, 1), "p2p", "copy", {3}, ONCE, left=True),
    Case("after a lost node", (*HEALED, "transfer.sent"), "wipe", 2, (4, 1), "rma", "copy", {3}, ONCE, left=True,
         lost=(0,)),
    Case("restore", ("restore.loading",), "trainer", 0, (2, 1), "rma", "alike", {3}, {"more": 0}, left=True),
    Case("restore of a lost node", ("parity.arrived",), "rank", 0, (3, 1), "p2p", "xor:3", {3}, {"more": 0}, left=True,
         lost=(0,)),
    Case("reprotect of a lost node", ("reprotect.begun", "parity.sent"), "courier", 1, (4, 1), "p2p", "rs:2+2", {6},
         {"last": 6}, left=True, lost=(0,)),
    # Own slot and copy of a rank are on two other nodes than before.
    Case("restore of moved ranks", ("restore.fetched",), "wipe", 1, (4, 1), "p2p", "copy", {3}, {"more": 0}, left=True,
         moved=(0, 1)),
    Case("reprotect of moved ranks", ("reprotect.begun", "transfer.received"), "node", -1, (4, 1), "rma", "copy", {3},
         {"more": 0}, left=True, moved=(0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_relaunch_restores_what_it_must_whoever_dies(shm: Path, case: Case) -> None:
    ranks, per_node = case.layout
    redundancy = "copy" if case.scheme == "alike" else case.scheme
    state = {"alike": case.scheme == "alike", "options": {"redundancy": redundancy}}
    if case.left:
        train_and_die(Cluster(shm, per_node), ranks, 3, SMALL, **state)
    cluster = Cluster(shm, per_node, transport=case.transport)
    cluster.wipe(*case.lost)
    cluster.move(dict(zip(case.moved, reversed(case.moved), strict=True)))
    trap = {"path": case.path, "action": case.dies, "rank": case.who}
    spec = {**state, "one_by_one": True, "traps": [trap], **case.train}
    if case.goes_on:
        spec |= {"goes_on": True, "strict": False}
    job = cluster.start(ranks, "support/worker.py", json.dumps(spec), env=SMALL)
    crashed = job.wait()
    assert any(job.out.glob("sprung*")), crashed.log
    if case.goes_on:
        assert_it_went_on(crashed, ranks, max(step or 0 for step in case.back), overlap=case.train is IN_A_ROW)
    else:
        assert len(crashed.of("end")) < ranks, crashed.log
    again = state | {name: value for name, value in case.train.items() if name in GROWS}
    result = cluster.run(ranks, "support/worker.py", json.dumps({**again, "more": 1}), env=SMALL)
    restored = result.of("restored")
    assert [r["wrong"] for r in restored] == [[]] * ranks, "bits differ"
    (step,) = {r["step"] for r in restored}
    assert step in case.back, crashed.log + result.log
    assert (step or 0) >= max((r["step"] for r in crashed.of("committed")), default=0), "a committed step was lost"
    assert {r["steps"][-1] for r in result.of("end")} == {(step or 0) + 1} and len(result.of("end")) == ranks
    # Nothing piles up: two own slots, two of another rank, two shares and a pulse for each rank, the lock of each node.
    each = 6 if case.scheme == "alike" else 4
    assert len(cluster.slot_files()) == each * ranks
    files = [path for node in range(ranks // per_node) for path in cluster.node(node).iterdir() if path.is_file()]
    assert len(files) == (each + 1) * ranks + ranks // per_node


def assert_it_went_on(crashed: Result, ranks: int, last: int, overlap: bool) -> None:
    """A courier that dies costs the saves that are on their way, the same ones on all ranks, and no process more."""
    assert crashed.returncode == 0 and len(crashed.of("end")) == ranks, crashed.log
    assert "died, and training goes on" in crashed.log
    assert {r["steps"][-1] for r in crashed.of("end")} == {last}, crashed.log
    failed = {(r["rank"], r["step"]) for r in crashed.of("failed")}
    steps = {step for _, step in failed}
    assert len(steps) <= 1 + overlap, crashed.log
    assert failed == {(rank, step) for rank in range(ranks) for step in steps}, crashed.log


def test_a_step_that_counts_is_protected_though_a_courier_died_before_its_parity_was_there(shm: Path) -> None:
    # The slots of all ranks are sealed by then: the next couriers find the step, and must not take it for protected.
    cluster, state = Cluster(shm), {"options": {"redundancy": "xor:3"}}
    trap = {"path": (*THIRD, "parity.received"), "action": "courier", "rank": 0}
    spec = {**state, "last": 3, "one_by_one": True, "traps": [trap], "goes_on": True, "strict": False}
    job = cluster.start(3, "support/worker.py", json.dumps(spec), env=SMALL)
    crashed = job.wait()
    assert any(job.out.glob("sprung*")), crashed.log
    assert_it_went_on(crashed, 3, 3, overlap=False)
    committed = {(record["rank"], record["step"]) for record in crashed.of("committed")}
    assert committed >= {(rank, 3) for rank in range(3)}, crashed.log
    cluster.wipe(1)
    result = cluster.run(3, "support/worker.py", json.dumps({**state, "more": 1}), env=SMALL)
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(3, [])] * 3, crashed.log + result.log
