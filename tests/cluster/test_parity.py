"""Parity on nodes that are really apart: every loss that is covered, one more, a spare, fewer nodes."""

from __future__ import annotations

import itertools

import pytest
from cluster.jobs import Cluster
from cluster.nodes import Nodes
from cluster.test_node_loss import assert_restored, slot_files, sources, train_and_die
from harness import assert_unrestorable

FOUR = ("host1", "host2", "host3", "host4")
THREE = FOUR[:3]


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
