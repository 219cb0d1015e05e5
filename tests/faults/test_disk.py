"""Power cuts: all processes killed, all memory wiped, and the disks of all nodes left; bits compared afterwards."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from harness import Cluster, assert_restored, assert_unrestorable

from mlflash.crash_points import POINTS

MIB = 1 << 20
IN_A_SAVE = [point for point in POINTS if point.split(".")[0] in ("stage", "protect", "transfer", "keep", "commit")]


def disks(root: Path) -> dict[str, str]:
    (root / "disks").mkdir(exist_ok=True)
    return {"MLFLASH_COPIES": str(root / "disks")}


@pytest.mark.gate
def test_after_a_power_cut_the_newest_step_is_on_the_disks(shm: Path) -> None:
    cluster, env = Cluster(shm), disks(shm)
    died = cluster.train(2, env, last=3, die_at=3, die="all")
    assert max(r["step"] for r in died.of("committed")) == 3
    cluster.wipe(0, 1)
    result = cluster.train(2, env, last=4)
    assert_restored(result, 2, 3)
    assert len(cluster.slot_files()) == 2 * 2, "copies are in memory"
    cluster.wipe(1)
    assert_restored(cluster.train(2, env, last=4), 2, 4)


@pytest.mark.gate
def test_a_restore_from_disks_that_is_killed_begins_again(shm: Path) -> None:
    cluster, env = Cluster(shm), disks(shm)
    cluster.train(2, env, last=3, die_at=3, die="all")
    for rank in (0, 1):
        cluster.wipe(0, 1)
        trap = {"path": ["restore.copied"], "action": "rank", "rank": rank}
        died = cluster.train(2, env, last=4, traps=[trap])
        assert died.returncode and not died.of("restored"), died.log
    assert_restored(cluster.train(2, env, last=4), 2, 3)


@pytest.mark.gate
def test_where_steps_are_kept_a_node_may_be_missing_after_a_power_cut(shm: Path) -> None:
    cluster, env = Cluster(shm), {**disks(shm), "MLFLASH_HISTORY": "1"}
    newest = 0
    for point, rank in (("keep.sealed", 0), ("keep.sealed", 1), ("transfer.sent", 0), ("transfer.sent", 1)):
        trap = {"path": [*["commit.seen"] * 2, point], "action": "rank", "rank": rank}
        died = cluster.train(2, env, last=9, traps=[trap])
        newest = max([newest, *(r["step"] for r in died.of("committed"))])
        for lost in (0, 1):  # what a restore has found is on both disks again
            cluster.wipe(0, 1)
            lose_disk(shm, lost)
            result = cluster.train(2, env, last=0)
            assert all(r["step"] >= newest and r["wrong"] == [] for r in result.of("restored")), result.log


def lose_disk(root: Path, node: int) -> None:
    for path in (root / "disks" / f"disk{node}").iterdir():
        shutil.rmtree(path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("history", [0, 1])
def test_twenty_power_cuts_at_any_point_of_a_save_lose_no_committed_step(shm: Path, history: int) -> None:
    cluster, env, draw, newest = Cluster(shm), disks(shm), random.Random(7), 0
    env["MLFLASH_HISTORY"], lost, restores = str(history), 0, 0
    for _ in range(20):
        points = [point for point in IN_A_SAVE if history or point != "keep.sealed"]
        path = ["commit.seen"] * draw.choice([0, 1, 2]) + [draw.choice(points)]
        trap = {"path": path, "action": "rank", "rank": draw.choice([0, 1])}  # mpiexec kills the other one
        died = cluster.train(2, env, last=newest + 8, nbytes=5 * MIB, traps=[trap])
        assert died.returncode, trap
        restored = died.of("restored")  # nothing, if it died in the restore
        assert all((r["step"] or 0) >= newest and r["wrong"] == [] for r in restored), died.log
        restores += bool(newest and restored)
        committed = [r["step"] for r in died.of("committed")]
        newest = max([newest, *committed, *(r["step"] or 0 for r in restored)])
        cluster.wipe(0, 1)
        if committed:  # otherwise it may have died before all was on the disk that was lost before
            lost = draw.choice([0, 1])
        if history:
            lose_disk(shm, lost)
    assert newest >= 10 and restores >= 10
    result = cluster.train(2, env, last=newest + 1, nbytes=5 * MIB)
    restored = result.of("restored")
    assert restored and all(r["step"] >= newest and r["wrong"] == [] for r in restored), result.log


def test_a_power_cut_and_a_lost_node_are_told(shm: Path) -> None:
    cluster, env = Cluster(shm), disks(shm)
    cluster.train(3, env, last=3, die_at=3, die="all")
    cluster.wipe(0, 1, 2)
    for path in (shm / "disks" / "disk1").iterdir():
        path.rename(shm / "away")
    gone = "no slot and no copy of rank 0 of 3 is on the nodes that are here"
    assert_unrestorable(cluster.train(3, env, last=9), 3, step_2=gone, step_3=gone)
    back = shm / "disks" / "disk1" / cluster.node(0).parent.name
    shutil.rmtree(back)
    (shm / "away").rename(back)
    assert_restored(cluster.train(3, env, last=4), 3, 3)
