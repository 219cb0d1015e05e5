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
from damage import flip, slot
from harness import Cluster, Result, assert_restored, train_and_die
from waiting import until

from mlflash.memory.slot import HEADER_NBYTES

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
    job = cluster.begin(ranks, SMALL, **spec)
    crashed = job.wait()
    assert any(job.out.glob("sprung*")), crashed.log
    if case.goes_on:
        assert_it_went_on(crashed, ranks, max(step or 0 for step in case.back), overlap=case.train is IN_A_ROW)
    else:
        assert len(crashed.of("end")) < ranks, crashed.log
    again = state | {name: value for name, value in case.train.items() if name in GROWS}
    result = cluster.train(ranks, SMALL, **again, more=1)
    restored = result.of("restored")
    assert [r["wrong"] for r in restored] == [[]] * ranks, "bits differ"
    (step,) = {r["step"] for r in restored}
    assert step in case.back, crashed.log + result.log
    assert (step or 0) >= max((r["step"] for r in crashed.of("committed")), default=0), "a committed step was lost"
    assert {r["steps"][-1] for r in result.of("end")} == {(step or 0) + 1} and len(result.of("end")) == ranks
    # Nothing piles up: two own slots, two of another rank, two shares and a pulse for each rank, the lock of each node.
    files_of_rank = 6 if case.scheme == "alike" else 4
    assert len(cluster.slot_files()) == files_of_rank * ranks
    files = [path for node in range(ranks // per_node) for path in cluster.node(node).iterdir() if path.is_file()]
    assert len(files) == (files_of_rank + 1) * ranks + ranks // per_node


def assert_it_went_on(crashed: Result, ranks: int, last: int, overlap: bool) -> None:
    """A courier that dies costs the saves that are on their way, the same ones on all ranks, and no process more."""
    assert crashed.returncode == 0 and len(crashed.of("end")) == ranks, crashed.log
    assert "died, and training goes on" in crashed.log
    assert {r["steps"][-1] for r in crashed.of("end")} == {last}, crashed.log
    failed = {(r["rank"], r["step"]) for r in crashed.of("failed")}
    steps = {step for _, step in failed}
    assert len(steps) <= 1 + overlap, crashed.log
    assert failed == {(rank, step) for rank in range(ranks) for step in steps}, crashed.log


def test_a_counted_step_is_protected_though_its_courier_died(shm: Path) -> None:
    # The slots of all ranks are sealed by then: the next couriers find the step, and must not take it for protected.
    cluster, state = Cluster(shm), {"options": {"redundancy": "xor:3"}}
    trap = {"path": (*THIRD, "parity.received"), "action": "courier", "rank": 0}
    spec = {**state, "last": 3, "one_by_one": True, "traps": [trap], "goes_on": True, "strict": False}
    job = cluster.begin(3, SMALL, **spec)
    crashed = job.wait()
    assert any(job.out.glob("sprung*")), crashed.log
    assert_it_went_on(crashed, 3, 3, overlap=False)
    committed = {(record["rank"], record["step"]) for record in crashed.of("committed")}
    assert committed >= {(rank, 3) for rank in range(3)}, crashed.log
    cluster.wipe(1)
    assert_restored(cluster.train(3, SMALL, **state, more=1), 3, 3)


# A restart on another number of ranks is killed on the way


@pytest.mark.parametrize(("point", "dies", "who", "again"), [
    ("transfer.sent", "node", 1, 2), ("commit.recorded", "wipe", 0, 4),
])  # fmt: skip
def test_a_crash_while_it_is_put_together_for_other_ranks(shm: Path, point: str, dies: str, who: int, again: int
                                                          ) -> None:  # fmt: skip
    # Four ranks on two nodes, then two, then two or four again; weights are alike, the rest is each rank's own.
    cluster = Cluster(shm, 2)
    state = {"alike": True, "options": {"redundancy": "copy"}}
    train_and_die(cluster, 4, 3, SMALL, **state)
    cluster.ranks_per_node = 1
    # No save: it is the restore that passes the points of a commit.
    trap = {"path": [point], "action": dies, "rank": who}
    job = cluster.begin(2, SMALL, **state, more=0, traps=[trap])
    crashed = job.wait()
    assert any(job.out.glob("sprung*")), crashed.log
    cluster.ranks_per_node = again // 2
    result = cluster.train(again, SMALL, **state, more=2)
    restored = result.of("restored")
    assert [(r["step"], r["wrong"]) for r in restored if r["rank"] < 2] == [(3, [])] * 2, crashed.log + result.log
    assert len(result.of("end")) == again, result.log
    assert {tuple(r["steps"]) for r in result.of("end")} == {(4, 5)}


# Damage at rest is repaired: a job saves a step, files of it are damaged, and the next save repairs them first


@dataclasses.dataclass(frozen=True)
class Repair:
    """What dies where while damage at rest is repaired.

    Attributes:
        damaged: kind of file, rank whose state it has, and the block that is damaged.
        path: the points that lead to the death.
        dies: rank | wipe: the node, with its memory.
        who: the rank that dies, or whose node does.
    """

    scheme: str
    damaged: tuple[tuple[str, int, int], ...]
    path: tuple[str, ...]
    dies: str
    who: int

    def __str__(self) -> str:
        what = "+".join(f"{kind} of {rank}" for kind, rank, _ in self.damaged)
        return f"{self.scheme}-{what}-{self.path[-1]}-{self.dies} {self.who}"

    @property
    def ranks(self) -> int:
        return {"copy": 2, "xor:3": 3, "rs:2+2": 4}[self.scheme]


OWN, COPY = ("own", 1, 0), ("copy", 1, 1)
TWO_PARITIES = (("parity", 1, 1), ("parity", 2, 1))
# test_each_point.py loses a node at each point, with one file that is damaged.
REPAIRS = [
    # Slot and copy are damaged, in different blocks: the slot is repaired by then, and the new copy is half there.
    Repair("copy", (OWN, COPY), ("repair.blocks", "transfer.arrived"), "wipe", 0),
    Repair("xor:3", (OWN,), ("repair.begun", "parity.gathered"), "rank", 2),
    # Two parity files are damaged in different stripes: each covers a lost node but for that stripe, as long as none is
    # given up before the new ones are there.
    Repair("rs:2+2", TWO_PARITIES, ("repair.blocks", "parity.received"), "wipe", 1),
]


@pytest.mark.parametrize("case", REPAIRS, ids=str)
def test_whatever_dies_while_damage_is_repaired_costs_no_more_than_before(shm: Path, case: Repair) -> None:
    cluster = Cluster(shm)
    # Where the second save is announced, what is repaired is over.
    traps = [{"path": case.path, "action": case.dies, "rank": case.who},
             {"path": ["protect.announced", "protect.announced"], "action": "pause"}]  # fmt: skip
    env = {**SMALL, "MLFLASH_REDUNDANCY": case.scheme}
    job = cluster.begin(case.ranks, env, program="keep_saving", last=2, hold_at=2, traps=traps)
    job.wait_for("committed", case.ranks)
    for kind, rank, block in case.damaged:
        path, header = slot(cluster.root, kind, rank, 1)
        flip(path, HEADER_NBYTES + block * header.extents.block_nbytes + 5000)
    log = job.out / "log"
    until(lambda: log.read_text().count("is damaged: ") == len(case.damaged), lambda: log.read_text())
    (job.out / "go on").touch()
    result = job.wait()
    assert not result.of("end") and len(result.of("committed")) == case.ranks, result.log
    assert (job.out / f"passed-{case.who}-0").stat().st_size == len(case.path), "it did not come so far"
    assert all(file.stat().st_size < 2 for file in job.out.glob("passed-*-1")), "it was over"
    for last in (3, 4):  # it goes on
        assert_restored(cluster.train(case.ranks, env, last=last), case.ranks, 1 if last == 3 else 3)


# FSDP2 with async saves of DCP


LAST = 6


def run_dcp(cluster: Cluster, **spec: Any) -> Result:
    env = {**SMALL, "PYTHONWARNINGS": "ignore"}
    return cluster.run(2, "support/dcp_worker.py", json.dumps(spec), env=env)


def losses(result: Result) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in result.of("loss") if record["rank"] == 0}


def test_a_job_killed_in_an_async_dcp_save_goes_on_where_it_was(shm: Path) -> None:
    uninterrupted = losses(run_dcp(Cluster(shm, job="undisturbed"), last=LAST))
    assert sorted(uninterrupted) == [*range(1, LAST + 1)]
    cluster = Cluster(shm)
    # Steps 1 to 3 are saved; in the save of the fourth, rank 1 dies with its node and its node's memory.
    trap = {"path": ["protect.announced"] * 4, "action": "wipe", "rank": 1}
    crashed = run_dcp(cluster, last=LAST, traps=[trap])
    assert any(shm.glob("out-*/sprung*")) and not crashed.of("end"), crashed.log
    committed = max((record["step"] for record in crashed.of("committed")), default=0)
    result = run_dcp(cluster, last=LAST)
    restored = {record["step"] for record in result.of("restored")}
    assert len(restored) == 1 and restored.pop() in range(max(committed, 1), 5), crashed.log + result.log
    assert [record["steps"][-1] for record in result.of("end")] == [LAST] * 2, result.log
    assert losses(crashed) | losses(result) == uninterrupted
    assert result.with_mpi == [False] * 2, result.log
