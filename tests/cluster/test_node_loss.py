"""Nodes that crash with their memory: real ones, that mlflash must find by itself; bits compared after the relaunch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from cluster.jobs import Cluster
from cluster.nodes import Nodes
from harness import Result, assert_unrestorable
from waiting import take

FOUR = ("host1", "host2", "host3", "host4")
THREE = FOUR[:3]
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
def test_any_of_three_nodes_may_be_lost_then_any_other(nodes: Nodes, transport: str, netmod: str) -> None:
    cluster = Cluster(nodes, transport, netmod)
    train_and_die(cluster, THREE, step=3)
    for lost, partner in (("host1", "host2"), ("host2", "host3"), ("host3", "host1")):
        crash(nodes, lost)
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
        crash(nodes, lost)
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


# Parity: every loss that is covered, one more, a spare, fewer nodes


def crash(nodes: Nodes, *hosts: str) -> None:
    for host in hosts:
        nodes.crash(host)
        nodes.boot(host)


@pytest.mark.parametrize(("scheme", "losses", "transport"), [("xor:4", 1, "rma"), ("rs:2+2", 2, "p2p")])
def test_every_loss_that_is_covered_is_restored_with_no_save_between(
    nodes: Nodes, scheme: str, losses: int, transport: str
) -> None:
    cluster = Cluster(nodes, transport)
    options = {"redundancy": scheme}
    train_and_die(cluster, FOUR, 3, options={"redundancy": scheme})
    for lost in itertools.combinations(FOUR, losses):
        crash(nodes, *lost)
        before = sum(nodes.sent_nbytes(host) for host in FOUR if host not in lost)
        result = cluster.run(FOUR, last=3, options=options)
        assert_restored(result, FOUR, 3)
        assert sources(result) == ["parity" if host in lost else host for host in FOUR]
        assert sum(nodes.sent_nbytes(host) for host in FOUR if host not in lost) - before > 300_000 * losses
        assert [slot_files(nodes, host) for host in FOUR] == [4, 4, 4, 4]
    crash(nodes, *FOUR[: losses + 1])
    refused = cluster.run(FOUR, last=1, options=options)
    gone = f"no slot and no copy of ranks 0-{losses} of 4 is on the nodes that are here"
    assert_unrestorable(refused, 4, **{f"step_{step}": gone for step in refused.of("unrestorable")[0]["reasons"]})


def test_a_spare_takes_the_place_of_a_lost_node_and_ranks_may_move(nodes: Nodes) -> None:
    cluster, options = Cluster(nodes), {"redundancy": "xor:3"}
    train_and_die(cluster, THREE, 3, options={"redundancy": "xor:3"})
    nodes.crash("host2")
    in_its_place = ("host1", "host4", "host3")
    result = cluster.run(in_its_place, last=4, options=options)
    assert_restored(result, in_its_place, 3)
    assert sources(result) == ["host1", "parity", "host3"]
    nodes.crash("host1")
    nodes.boot("host2")
    moved = ("host3", "host2", "host4")  # all ranks change places, and one node is new
    result = cluster.run(moved, last=5, options=options)
    assert_restored(result, moved, 4)
    assert sources(result) == ["parity", "host4", "host3"]


def test_the_ranks_of_four_nodes_go_on_with_three(nodes: Nodes) -> None:
    cluster = Cluster(nodes)
    train_and_die(cluster, FOUR, 3, options={"redundancy": "rs:2+2"})
    nodes.crash("host3")
    fewer = ("host1", "host1", "host2", "host4")
    result = cluster.run(fewer, last=4, options={"redundancy": "xor:3"})
    assert_restored(result, fewer, 3)
    assert sources(result) == ["host1", "host2", "parity", "host4"]
    crash(nodes, "host1")  # two ranks were there: one is covered by parity, one by a copy, as its node has more ranks
    assert_restored(cluster.run(fewer, last=5, options={"redundancy": "xor:3"}), fewer, 4)
