"""Real nodes that crash at named points of a save, of a restore and of the heal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cluster.jobs import Cluster
from cluster.nodes import Nodes
from cluster.test_node_loss import assert_restored
from waiting import until

HOSTS = ("host1", "host2")
SAVE, HEAL = ["commit.seen", "commit.seen"], ["heal.begun"]


def crash_at(
    nodes: Nodes, cluster: Cluster, path: list[str], victim: int, hosts: Sequence[str] = HOSTS, **options: object
) -> None:
    """Start a job; when the victim comes to the end of the path it waits there, and its node goes."""
    trap = {"path": path, "action": "wait", "rank": victim}
    job = cluster.start(hosts, one_by_one=True, traps=[trap], **options)
    until((job.out / f"sprung{victim}").exists, lambda: f"rank {victim} at {path}\n{(job.out / 'log').read_text()}")
    nodes.crash(hosts[victim])
    job.wait()
    nodes.boot(hosts[victim])


def check_restored(cluster: Cluster, allowed: set[int]) -> None:
    result = cluster.run(HOSTS, more=1)
    restored = result.of("restored")
    assert len({r["step"] for r in restored}) == 1 and restored[0]["step"] in allowed, result.log
    assert [r["wrong"] for r in restored] == [[], []]
    assert [r["report"]["node"] for r in restored] == [*HOSTS]
    assert len(result.of("end")) == 2, result.log


@pytest.mark.parametrize(
    ("point", "allowed", "transport"),
    [("stage.unsealed", {2}, "p2p"), ("transfer.sent", {2}, "rma"), ("transfer.arrived", {2, 3}, "p2p"),
     ("protect.sealed", {2, 3}, "rma"), ("commit.agreed", {3}, "p2p")],
)  # fmt: skip
def test_a_node_that_crashes_in_a_save(nodes: Nodes, point: str, allowed: set[int | None], transport: str) -> None:
    cluster = Cluster(nodes, transport)
    before = ["commit.released"] * 2 if point.startswith("stage") else SAVE  # it stages before its courier has seen all
    crash_at(nodes, cluster, [*before, point], victim=1, last=3)
    check_restored(cluster, allowed)


@pytest.mark.parametrize("path", [["restore.adopted"], ["transfer.arrived"], ["restore.loaded"], [*HEAL, "heal.done"]])
def test_a_node_that_is_lost_again_while_it_is_rebuilt(nodes: Nodes, path: list[str]) -> None:
    cluster = Cluster(nodes)
    cluster.run(HOSTS, last=3)
    nodes.crash(HOSTS[1])
    nodes.boot(HOSTS[1])
    crash_at(nodes, cluster, path, victim=1, more=0)
    check_restored(cluster, {3})


@pytest.mark.parametrize(("path", "is_healed"), [(["restore.adopted"], False), ([*HEAL, "heal.done"], True)])
def test_the_other_node_lost_before_the_heal_and_after_it(nodes: Nodes, path: list[str], is_healed: bool) -> None:
    cluster = Cluster(nodes)
    cluster.run(HOSTS, last=3)
    nodes.crash(HOSTS[1])
    nodes.boot(HOSTS[1])
    crash_at(nodes, cluster, path, victim=0, more=0)
    if is_healed:
        check_restored(cluster, {3})
    else:  # the new node has nothing yet, not even what says that anything was committed
        assert_restored(cluster.run(HOSTS, more=1), HOSTS, None)
