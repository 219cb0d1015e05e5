"""A rank or a node dies while what was damaged at rest is repaired: nothing is worse than if it had not been begun.

A job saves a step, files of it are damaged in its memory, its couriers find that, and the next save repairs it
first. At a point of that a rank or a node dies. The relaunch has to restore the step, as it would have from the damaged
memory.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from damage import flip, slot
from harness import Cluster
from waiting import until

from mlflash.memory.slot import HEADER_NBYTES

ENV = {"MLFLASH_TEST_BLOCK_NBYTES": "16384"}


@dataclasses.dataclass(frozen=True)
class Case:
    """What dies where.

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
CASES = [
    # Slot and copy are damaged, in different blocks: the slot is repaired by then, and the new copy is half there.
    Case("copy", (OWN, COPY), ("repair.blocks", "transfer.arrived"), "wipe", 0),
    Case("xor:3", (OWN,), ("repair.begun", "parity.gathered"), "rank", 2),
    # Two parity files are damaged in different stripes: each covers a lost node but for that stripe, as long as none is
    # given up before the new ones are there.
    Case("rs:2+2", TWO_PARITIES, ("repair.blocks", "parity.received"), "wipe", 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whatever_dies_while_damage_is_repaired_costs_no_more_than_before(shm: Path, case: Case) -> None:
    cluster = Cluster(shm)
    # Where the second save is announced, what is repaired is over.
    traps = [{"path": case.path, "action": case.dies, "rank": case.who},
             {"path": ["protect.announced", "protect.announced"], "action": "pause"}]  # fmt: skip
    env = {**ENV, "MLFLASH_REDUNDANCY": case.scheme}
    spec = {"program": "keep_saving", "last": 2, "hold_at": 2, "traps": traps}
    job = cluster.start(case.ranks, "support/worker.py", json.dumps(spec), env=env)
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
        result = cluster.run(case.ranks, "support/worker.py", json.dumps({"last": last}), env=env)
        assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(1 if last == 3 else 3, [])] * case.ranks
        assert len(result.of("end")) == case.ranks, result.log
