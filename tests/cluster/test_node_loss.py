"""Nodes that crash with their memory: real ones, that mlflash must find by itself; bits compared after the relaunch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from cluster.jobs import Cluster
from cluster.nodes import Nodes
from harness import Result
from waiting import take

THREE = ("host1", "host2", "host3")
# Each transport over what MPI uses unless told otherwise, and one over each of its other ways.
WAYS = [
    pytest.param("p2p", "ucx", marks=pytest.mark.gate),
    ("rma", "ucx"),
    ("rma", "ofi"),
]


def train_and_die(cluster: Cluster, hosts: Sequence[str], step: int, per_node: int = 1, **more: object) -> None:
    """Train up to a committed step, then every process dies at once."""
    result = cluster.run_until_all_die(hosts, step, per_node=per_node, **more)
    assert len(result.of("committed")) >= per_node * len(hosts), result.log
    assert not result.of("end")


def assert_restored(result: Result, hosts: Sequence[str], step: int | None, per_node: int = 1) -> None:
    """Every rank restored this step, bit for bit, on the node where it was started, and came to its end."""
    restored = result.of("restored")
    assert [r["step"] for r in restored] == [step] * per_node * len(hosts), result.log
    assert [r["wrong"] for r in restored] == [[]] * per_node * len(hosts)
    assert [r["report"]["node"] for r in restored] == [host for host in hosts for _ in range(per_node)]
    assert len(result.of("end")) == per_node * len(hosts), result.log


def sources(result: Result) -> list[str]:
    """The node that each rank's state came from."""
    return [r["report"]["restored_from"] for r in result.of("restored")]


def slot_files(nodes: Nodes, host: str) -> int:
    """How many slots are in the memory of a node."""
    return nodes.run(host, "find", "/dev/shm", "-name", "slot-*").count("/j/slot-")


@pytest.mark.parametrize(("transport", "netmod"), WAYS)
def test_any_of_three_nodes_may_be_lost_and_after_the_reprotection_any_other_too(
    nodes: Nodes, transport: str, netmod: str
) -> None:
    cluster = Cluster(nodes, transport, netmod)
    train_and_die(cluster, THREE, step=3)
    for lost, partner in (("host1", "host2"), ("host2", "host3"), ("host3", "host1")):
        nodes.crash(lost)
        nodes.boot(lost)
        before = nodes.sent_nbytes(partner)
        # No save between two losses: it is the reprotection that makes the copies again.
        result = cluster.run(THREE, last=3)
        assert_restored(result, THREE, 3)
        assert sources(result) == [partner if host == lost else host for host in THREE]
        assert nodes.sent_nbytes(partner) - before > 300_000, "the state did not come over the cable"
        assert [slot_files(nodes, host) for host in THREE] == [4, 4, 4]


@pytest.mark.parametrize("per_node", [1, 2])
def test_what_ranks_hold_alike_is_not_sent_and_comes_from_a_node_that_is_left(nodes: Nodes, per_node: int) -> None:
    cluster, hosts = Cluster(nodes, "p2p"), ("host1", "host2")
    before = nodes.sent_nbytes("host1")
    train_and_die(cluster, hosts, step=9, per_node=per_node, nbytes=3_000_000, alike=True)
    assert nodes.sent_nbytes("host1") - before < 9 * 300_000, "what is alike was sent"
    for lost, left in (hosts, hosts[::-1]):
        nodes.crash(lost)
        nodes.boot(lost)
        before = nodes.sent_nbytes(left)
        result = cluster.run(hosts, last=9, per_node=per_node, nbytes=3_000_000, alike=True)
        assert_restored(result, hosts, 9, per_node=per_node)
        assert nodes.sent_nbytes(left) - before > 3_000_000
        assert [slot_files(nodes, host) for host in hosts] == [6 * per_node] * 2


@pytest.mark.parametrize(("seed", "transport"), [(0, "p2p"), (1, "rma")])
def test_a_crash_at_any_time_loses_nothing_that_was_committed(nodes: Nodes, seed: int, transport: str) -> None:
    rng, cluster = random.Random(seed), Cluster(nodes, transport)
    step = 0
    for _ in range(3):
        for host in THREE:
            nodes.limit_rate(host, 200)  # nearly all the time a save is on its way
        job = cluster.start(THREE, last=step + 1000, nbytes=2_000_000)
        job.wait_for("committed", len(THREE))
        take(rng.uniform(0, 0.5))
        lost = rng.choice(THREE)
        nodes.crash(lost)
        result = job.wait()
        assert not result.of("end")
        assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(step or None, [])] * len(THREE)
        committed = max(r["step"] for r in result.of("committed"))
        nodes.boot(lost)
        check = cluster.run(THREE, last=0, nbytes=2_000_000)
        step = check.of("restored")[0]["step"]
        assert step >= committed, result.log + check.log
        assert_restored(check, THREE, step)
