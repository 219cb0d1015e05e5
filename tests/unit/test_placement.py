"""Who protects whom: for every node count, on other nodes, spread over failure domains, deterministic."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.layouts import SCHEMES, layout

from mlflash.errors import ConfigError
from mlflash.placement.protection_groups import deal, place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.topology import Topology, from_node_ids
from mlflash.startup.start import _say_what_is_made


def nodes_of(topology: Topology, ranks: tuple[int, ...]) -> set[int]:
    return {topology.node_of[rank] for rank in ranks}


@pytest.mark.parametrize(
    "text", ["", "raid", "copy:0", "copy:4", "xor", "xor:2", "xor:17", "rs:1+2", "rs:4+0", "rs:4+4", "rs:14+3"]
)
def test_a_scheme_that_makes_no_sense_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(ConfigError, match=r"copy:k, xor:n .* or rs:n\+k"):
        parse(text)


@given(nodes=st.integers(1, 39), scheme=st.sampled_from(SCHEMES))
def test_every_rank_is_protected_by_as_many_other_nodes_as_it_can_be(scheme: str, nodes: int) -> None:
    wanted = parse(scheme)
    topology = layout(*[2] * nodes)
    placed = place(topology, wanted)
    for rank in range(2 * nodes):
        group = placed.parity_group_of[rank]
        if group:
            assert not placed.partners[rank] and len(nodes_of(topology, group)) == len(group)
            assert min(nodes, wanted.members) <= len(group) < 2 * wanted.members
            assert {topology.ranks_on[topology.node_of[r]].index(r) for r in group} == {rank % 2}
        else:
            others = nodes_of(topology, placed.partners[rank]) - {topology.node_of[rank]}
            assert len(others) == len(placed.partners[rank]) == min(wanted.losses, nodes - 1)
    assert bool(placed.parity_groups) == (wanted.parity and nodes >= wanted.losses + 2)
    sizes = [len(group) for group in placed.node_groups]
    assert nodes == 1 or max(sizes) - min(sizes) <= 1


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=9),
    shuffle=st.randoms(use_true_random=False),
    scheme=st.sampled_from(SCHEMES),
)
def test_any_shape_of_job_is_placed_on_other_nodes(sizes: list[int], shuffle: object, scheme: str) -> None:
    homes = [node for node, size in enumerate(sizes) for _ in range(size)]
    shuffle.shuffle(homes)  # type: ignore[attr-defined]
    leaders = [homes.index(node) for node in homes]
    topology = from_node_ids([(leader, f"n{node}") for leader, node in zip(leaders, homes, strict=True)])
    wanted = parse(scheme)
    placed = place(topology, wanted)
    for rank in range(len(homes)):
        group, partners = placed.parity_group_of[rank], placed.partners[rank]
        assert bool(group) != bool(partners)
        together = group or (rank, *partners)
        assert len(nodes_of(topology, together)) == len(together)
        assert not group or len(group) >= wanted.losses + 2
        assert group or len(partners) == min(wanted.losses, len(sizes) - 1)
        assert all(rank in placed.owners[partner] for partner in partners)
        assert {placed.connected[other] for other in together} == {placed.connected[rank]}


@given(
    racks=st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from("123")), min_size=2, max_size=60),
    size=st.integers(2, 16),
)
def test_no_group_has_more_nodes_of_a_domain_than_it_must_at_any_level(racks: list[tuple[str, str]], size: int) -> None:
    domains = [(row, f"{row}/{rack}") for row, rack in racks]
    groups = deal(domains, size)
    assert sorted(node for group in groups for node in group) == list(range(len(domains)))
    for level in (0, 1):
        for name in {domain[level] for domain in domains}:
            there = [sum(domains[node][level] == name for node in group) for group in groups]
            assert max(there) <= math.ceil(sum(there) / len(groups))


def test_a_spare_takes_the_place_of_a_dead_node_and_all_other_groups_stay() -> None:
    scheme = parse("xor:3")
    domains = [("A",)] * 3 + [("B",)] * 3
    before = place(layout(*[2] * 6), scheme, domains)
    assert before.node_groups == ((0, 2, 4), (1, 3, 5))
    domains[0] = ("B",)  # the spare stands in another rack: dealt anew, the groups would be others
    again = place(layout(*[2] * 6), scheme, domains)
    assert again.node_groups != before.node_groups
    kept = place(layout(*[2] * 6), scheme, domains, before.parity_groups)
    assert (kept.parity_groups, kept.node_groups) == (before.parity_groups, before.node_groups)


@pytest.mark.parametrize(
    "recorded",
    [
        ((0, 2, 4), (1, 3, 5)),  # two ranks of a node in one group, as ranks have moved
        ((0, 1, 3),),  # ranks 2, 4 and 5 are new
        ((0, 4), (1, 5), (2, 3)),  # of a smaller scheme
    ],
)
def test_groups_of_the_run_before_that_make_no_sense_now_are_formed_anew(recorded: tuple[tuple[int, ...], ...]) -> None:
    topology = Topology((0, 1, 0, 1, 2, 2), ("a", "b", "c"))
    assert place(topology, parse("xor:3"), (), recorded) == place(topology, parse("xor:3"))


@pytest.mark.parametrize(
    ("nodes", "scheme", "said"),
    [
        (1, "copy", r"2 ranks on 1 node \(.+\): .* any process, but not of this node"), (1, "none", None),
        (2, "copy", None), (2, "copy:2", "'copy:2' .* copy is"),
        (2, "xor:4", "copy is made"), (3, "xor:4", None), (3, "rs:6+2", "copy:2 is made"), (4, "rs:6+2", None),
        (11, "xor:4", None),
    ],
)  # fmt: skip
def test_too_few_nodes_for_a_scheme_are_said_once(
    caplog: pytest.LogCaptureFixture, nodes: int, scheme: str, said: str | None
) -> None:
    topology = layout(*[2] * nodes)
    _say_what_is_made(place(topology, parse(scheme)), topology.node_names)
    assert len(caplog.records) == (said is not None)
    assert said is None or re.search(said, caplog.records[0].getMessage())
