"""Lost nodes: real processes, killed; real memory, wiped; bits compared after the relaunch."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from harness import Cluster, assert_restored, assert_unrestorable, train_and_die
from processes import state
from waiting import take, until

from mlflash.memory.slot import COMMIT_START, HEADER_NBYTES, RECORD_NBYTES, unpack

TRANSPORTS = ("p2p", "rma")


def test_any_single_node_may_be_lost_then_any_other(shm: Path) -> None:
    cluster = Cluster(shm, ranks_per_node=2, transport="rma")
    train_and_die(cluster, 4, step=3)
    for lost in (0, 1):
        cluster.wipe(lost)
        # No save between two losses: it is the reprotection that makes the copies again. One save after the last.
        result = cluster.train(4, last=3 + lost)
        assert_restored(result, 4, 3)
        fetched = [r["report"]["counts"].get("slots fetched", 0) for r in result.of("restored")]
        assert fetched == [int(rank // 2 == lost) for rank in range(4)], "a slot at home was transferred"
        assert len(cluster.slot_files()) == 4 * 4
    assert_restored(cluster.train(4, last=4), 4, 4)


def test_one_node_with_a_node_of_fewer_ranks(shm: Path) -> None:
    cluster = Cluster(shm, ranks_per_node=3)  # nodes of 3 and 2 ranks
    train_and_die(cluster, 5, step=3)
    for lost in (0, 1):
        cluster.wipe(lost)
        assert_restored(cluster.train(5, last=3), 5, 3)


def test_losing_both_partners_is_told_and_touches_nothing(shm: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 4, step=2)
    cluster.wipe(0, 1)  # partners are 0-2 and 1-3
    assert_restored(cluster.train(4, last=3), 4, 2)
    lost = {k: cluster.node(k).rename(shm / f"lost{k}") for k in (1, 3)}
    before = {path: path.read_bytes() for path in cluster.slot_files()}
    gone = "no slot and no copy of ranks 1, 3 of 4 is on the nodes that are here: .* node0, node2"
    options = {"reserve": 1 << 22}  # larger slots, which would be made in the place of those that are there
    assert_unrestorable(cluster.train(4, last=9, options=options), 4, step_2=gone, step_3=gone)
    assert {path: path.read_bytes() for path in cluster.slot_files()} == before
    for k, path in lost.items():  # the nodes are back
        shutil.rmtree(cluster.node(k))
        path.rename(cluster.node(k))
    assert_restored(cluster.train(4, last=4), 4, 3)


def test_a_fresh_start_frees_the_old_slots_at_its_first_commit(shm: Path) -> None:
    cluster, options = Cluster(shm), {"options": {"fresh": True}}
    train_and_die(cluster, 2, step=3)
    old = {path: path.read_bytes() for path in cluster.slot_files()}
    result = cluster.train(2, last=1, traps=[{"path": ["stage.unsealed"], "action": "rank", "rank": 0}], **options)
    assert {r["step"] for r in result.of("restored")} == {None}, result.log
    assert "steps [2, 3] in memory are passed over" in result.log
    assert old == {path: path.read_bytes() for path in old}, "freed before the first commit"
    assert_restored(cluster.train(2, last=2, **options), 2, None)
    assert len(cluster.slot_files()) == 8
    assert_restored(cluster.train(2, last=3, **options), 2, 2)
    assert_restored(cluster.train(2, last=3), 2, 3)
    assert_restored(cluster.train(2, last=1, options={"fresh": "again"}), 2, None)


def test_without_redundancy_only_a_lost_node_costs_steps(shm: Path) -> None:
    cluster, options = Cluster(shm), {"options": {"redundancy": "none"}}
    train_and_die(cluster, 2, step=2, **options)
    result = cluster.train(2, last=2, **options)
    assert_restored(result, 2, 2)
    assert len(cluster.slot_files()) == 4
    cluster.wipe(1)
    told = cluster.train(2, last=1, **options)
    assert_unrestorable(told, 2, step_1="no slot and no copy of rank 1 of 2", step_2="ranks that were on node0")


# Of four ranks, rank 1 and its partner are done at once, and the copy of rank 0 is late.
@pytest.mark.parametrize(
    ("ranks", "per_node", "die_rank", "transport", "sizes"),
    [(2, 1, 0, "p2p", {}), (4, 2, 1, "rma", {"nbytes": 1000, "big_rank": 0, "big_nbytes": 60_000_000})],
)
def test_the_first_to_see_its_commit_may_die_in_that_moment(
    shm: Path, ranks: int, per_node: int, die_rank: int, transport: str, sizes: dict[str, int]
) -> None:
    cluster = Cluster(shm, per_node, transport=transport)
    result = cluster.train(ranks, last=9, die_at=3, die_rank=die_rank, die="committed", **sizes)
    assert not result.of("end")
    again = cluster.train(ranks, last=5, **sizes)
    steps = {r["step"] for r in again.of("restored")}
    # The others may have gone on, but not past the next commit, which needs the dead node.
    assert steps in ({3}, {4}), result.log + again.log
    assert_restored(again, ranks, steps.pop())


def test_a_commit_that_only_one_rank_has_seen_comes_back_when_its_node_is_lost(shm: Path) -> None:
    cluster, ranks = Cluster(shm, transport="rma"), 3
    seen = ["commit.seen"] * 2
    # The others stop before they write a receipt; this one's node goes in the moment in which its snapshot says so.
    traps = [{"path": [*seen, "commit.agreed"], "action": "wait", "rank": rank} for rank in range(1, ranks)]
    traps.append({"path": [*seen, "commit.seen"], "action": "wipe", "rank": 0})
    crashed = cluster.train(ranks, last=9, one_by_one=True, traps=traps)
    assert {r["step"] for r in crashed.of("committed") if r["rank"] > 0} == {1, 2}
    assert_restored(cluster.train(ranks, more=1), ranks, 3)


@pytest.mark.parametrize(("places", "transport"), [({0: 1, 1: 0}, "rma"), ({0: 1, 1: 2, 2: 0}, "p2p")])
def test_ranks_that_moved_restore_and_do_not_double_the_memory(
    shm: Path, places: dict[int, int], transport: str
) -> None:
    ranks = max(places) + 1
    cluster = Cluster(shm, transport=transport)
    train_and_die(cluster, ranks, step=3)
    cluster.move(places)
    result = cluster.train(ranks, last=5)
    assert_restored(result, ranks, 3)
    assert len(cluster.slot_files()) == 4 * ranks
    # And the redundancy is whole in its new places.
    cluster.wipe(places[0])
    assert_restored(cluster.train(ranks, last=6), ranks, 5)


def test_ranks_that_moved_and_lost_a_node_besides(shm: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 3, step=3)
    cluster.move({0: 1, 1: 2, 2: 0})
    cluster.wipe(0)
    assert_restored(cluster.train(3, last=4), 3, 3)


def test_another_world_size_without_a_state_is_refused_by_name(shm: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, step=2)
    result = cluster.train(3, last=2, load=True)
    assert result.returncode != 0
    assert "another number of ranks saved" in result.log
    assert "expected: a world of 2 ranks" in result.log
    assert_restored(cluster.train(2, last=2), 2, 2)  # and nothing was lost by trying


def test_no_save_overwrites_what_alone_covers_a_lost_node(shm: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 4, step=3)
    for path in cluster.slot_files():  # as if they had died before all copies of step 3 were there, one of them not
        with path.open("r+b") as file:
            header = unpack(file.read(HEADER_NBYTES))
            if header.step == 3:
                file.seek(COMMIT_START)
                file.write(bytes(RECORD_NBYTES))
            if (header.step, header.rank) == (3, 0) and "node2" in path.parts:
                file.seek(0)
                file.write(bytes(HEADER_NBYTES))
    traps = [{"path": ["reprotect.begun"], "action": "wait", "rank": rank} for rank in range(4)]
    job = cluster.begin(4, more=1, traps=traps)
    assert {r["step"] for r in job.wait_for("restored", 4)} == {3}
    job.wait_for("saving", 4)  # and the save of step 4 would be staged now
    threads = [Path(f"/proc/{pid}/task/{pid}/stat") for pid in job.pids().values()]  # the main ones
    until(lambda: all(state(thread) == "S" for thread in threads * 20), "all ranks to wait for a slot")
    job.kill()
    cluster.wipe(0)
    assert_restored(cluster.train(4, more=1), 4, 2)


@pytest.mark.parametrize("seed", range(2))
def test_a_kill_at_any_time_loses_nothing_that_was_committed(shm: Path, seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(shm, transport=TRANSPORTS[seed])
    step = 0
    for _ in range(3):
        job = cluster.begin(2, last=step + 1000, nbytes=2_000_000)
        job.wait_for("committed", 4)
        take(rng.uniform(0, 0.3))
        node = rng.randrange(2)
        job.signal([node])
        cluster.wipe(node)
        result = job.wait()
        committed = max(r["step"] for r in result.of("committed"))
        restored = {r["step"] for r in result.of("restored")}
        assert restored == {step or None}
        check = cluster.train(2, last=0, nbytes=2_000_000)
        step = check.of("restored")[0]["step"]
        assert step >= committed
        assert_restored(check, 2, step)
