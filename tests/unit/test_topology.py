"""Who protects whom: for every node count, on another node, deterministic."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflash.topology import from_node_ids, groups, owners, partner_nodes, partners, survives


@pytest.mark.parametrize("nodes", range(2, 40))
def test_every_node_has_a_partner_that_is_another_node_and_holds_one_copy(nodes: int) -> None:
    found = partner_nodes(nodes)
    assert sorted(found) == list(range(nodes))
    assert all(i != p for i, p in enumerate(found))


def test_nodes_are_paired_half_the_machine_apart() -> None:
    assert partner_nodes(1) == (-1,)
    assert partner_nodes(2) == (1, 0)
    assert partner_nodes(3) == (1, 2, 0)
    assert partner_nodes(4) == (2, 3, 0, 1)
    assert partner_nodes(5) == (1, 0, 3, 4, 2)
    assert partner_nodes(8) == (4, 5, 6, 7, 0, 1, 2, 3)


@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=9), shuffle=st.randoms(use_true_random=False))
def test_partners_are_on_other_nodes_and_no_rank_holds_more_than_it_must(sizes: list[int], shuffle: object) -> None:
    homes = [node for node, size in enumerate(sizes) for _ in range(size)]
    shuffle.shuffle(homes)  # type: ignore[attr-defined]
    leaders = [homes.index(node) for node in homes]
    topology = from_node_ids([(leader, f"n{node}") for leader, node in zip(leaders, homes, strict=True)])
    found = partners(topology)
    held = owners(found)
    for rank, partner in enumerate(found):
        assert topology.node_of[partner] != topology.node_of[rank]
        assert rank in held[partner]
    for ranks in topology.ranks_on:
        loads = [len(held[rank]) for rank in ranks]
        assert max(loads) - min(loads) <= 1
    numbers = groups(found)
    assert all(numbers[rank] == numbers[partner] for rank, partner in enumerate(found))


def test_ranks_without_a_rail_use_the_least_loaded_rank() -> None:
    topology = from_node_ids([(0, "a"), (0, "a"), (0, "a"), (3, "b")])
    assert partners(topology) == (3, 3, 3, 0)
    assert owners(partners(topology)) == ((3,), (), (), (0, 1, 2))


def test_survives_says_what_the_layout_survives() -> None:
    def layout(nodes: int, scheme: str = "copy") -> str:
        return survives(from_node_ids([(i, str(i)) for i in range(nodes)]), scheme)

    assert layout(1) == "any process; no node (there is only one node, so no copies are made)"
    assert layout(2) == "any process; any 1 of 2 nodes"
    assert layout(5) == "any process; any 1 of 5 nodes; 6 of 10 pairs of nodes"
    assert layout(8) == "any process; any 1 of 8 nodes; 24 of 28 pairs of nodes"
    assert layout(8, "none") == "any process; no node (redundancy is 'none')"


def test_planning_for_16384_ranks_takes_less_than_a_second() -> None:
    ids = [(rank // 8 * 8, f"n{rank // 8}") for rank in range(16_384)]
    start = time.process_time()
    found = partners(from_node_ids(ids))
    groups(found), owners(found)
    assert time.process_time() - start < 1.0
