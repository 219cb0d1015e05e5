"""Who protects whom, on other nodes, spread over failure domains; and what a placement survives."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.layouts import SCHEMES, layout

from mlflash.errors import ConfigError
from mlflash.placement.redundancy import form_groups, parse, place
from mlflash.placement.survival import Survival, describe, of, too_close
from mlflash.placement.topology import Topology, from_node_ids


def nodes_of(topology: Topology, ranks: tuple[int, ...]) -> set[int]:
    return {topology.node_of[rank] for rank in ranks}


@pytest.mark.parametrize(
    "text", ["", "raid", "copy:0", "copy:4", "xor", "xor:2", "xor:17", "rs:1+2", "rs:4+0", "rs:4+4", "rs:14+3"]
)
def test_a_scheme_that_makes_no_sense_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(ConfigError, match=r"copy:k, xor:n .* or rs:n\+k"):
        parse(text)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9) | st.integers(1, 39).map(lambda nodes: [2] * nodes),
    shuffle=st.randoms(use_true_random=False),
    scheme=st.sampled_from(SCHEMES),
)
def test_every_rank_of_any_job_is_protected_by_as_many_other_nodes_as_it_can_be(
    sizes: list[int], shuffle: random.Random, scheme: str
) -> None:
    homes = [node for node, size in enumerate(sizes) for _ in range(size)]
    shuffle.shuffle(homes)
    topology = from_node_ids([(homes.index(node), f"n{node}") for node in homes])
    wanted, nodes = parse(scheme), len(sizes)
    placed = place(topology, wanted)
    for rank in range(len(homes)):
        group, partners = placed.parity_group_of[rank], placed.partners[rank]
        together = group or (rank, *partners)
        assert len(nodes_of(topology, together)) == len(together)
        assert all(rank in placed.owners[partner] for partner in partners)
        assert {placed.connected[other] for other in together} == {placed.connected[rank]}
        if not group:
            assert len(partners) == min(wanted.losses, nodes - 1)
            continue
        assert not partners and wanted.losses + 2 <= len(group) < 2 * wanted.members
        assert len({topology.ranks_on[topology.node_of[other]].index(other) for other in group}) == 1
        assert len({*sizes}) > 1 or len(group) >= min(nodes, wanted.members)
    assert bool(placed.parity_groups) == (wanted.parity and nodes >= wanted.losses + 2)
    in_groups = [len(group) for group in placed.node_groups]
    assert nodes == 1 or max(in_groups) - min(in_groups) <= 1


@given(
    racks=st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from("123")), min_size=2, max_size=60),
    size=st.integers(2, 16),
)
def test_no_group_has_more_nodes_of_a_domain_than_it_must_at_any_level(racks: list[tuple[str, str]], size: int) -> None:
    domains = [(row, f"{row}/{rack}") for row, rack in racks]
    groups = form_groups(domains, size)
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
    unrecorded = place(layout(*[2] * 6), scheme, domains)
    assert unrecorded.node_groups != before.node_groups
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


# What a placement survives is computed, and is right: compared with trying every loss


def survival(scheme: str, *sizes: int) -> Survival:
    topology = layout(*sizes)
    return of(topology, place(topology, parse(scheme)))


@pytest.mark.parametrize("scheme", SCHEMES)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=8))
def test_the_count_of_losses_survived_is_that_of_trying_each(scheme: str, sizes: list[int]) -> None:
    computed = survival(scheme, *sizes)
    nodes = len(sizes)
    counted = [
        sum(computed.survives(lost) for lost in itertools.combinations(range(nodes), n)) for n in range(nodes + 1)
    ]
    assert computed.surviving(nodes) == counted
    assert computed.any_nodes == max(n for n in range(nodes + 1) if counted[n] == math.comb(nodes, n))
    assert computed.any_nodes == min(parse(scheme).losses, nodes - 1)


def test_survives_says_what_the_layout_survives() -> None:
    assert describe(survival("copy", 1)) == "any process; no node (there is only one)"
    assert describe(survival("none", 1, 1)) == "any process; no node (redundancy is 'none')"
    assert describe(survival("copy", 1, 1)) == "any process; any 1 of 2 nodes"
    assert describe(survival("copy", *[1] * 5)) == "any process; any 1 of 5 nodes; 6 of 10 pairs of nodes"
    assert describe(survival("copy", *[2] * 8)) == "any process; any 1 of 8 nodes; 24 of 28 pairs of nodes"
    assert describe(survival("rs:6+2", *[1] * 8)) == "any process; any 2 of 8 nodes"
    assert describe(survival("rs:2+2", *[1] * 8)) == "any process; any 2 of 8 nodes; 48 of 56 triples of nodes"
    assert describe(survival("xor:8", 2, 2)) == "any process; any 1 of 2 nodes"


@given(domains=st.text("ABCDE", min_size=3, max_size=12), scheme=st.sampled_from(SCHEMES))
def test_the_domains_said_to_be_covered_are_those_found_by_trying_each(domains: str, scheme: str) -> None:
    topology = layout(*[1] * len(domains))
    computed = of(topology, place(topology, parse(scheme), [(name,) for name in domains]))
    text = describe(computed, {"rack": domains})
    names = sorted(set(domains), key=domains.index)
    racks = {name: [node for node, there in enumerate(domains) if there == name] for name in names}
    fatal = [name for name in names if not computed.survives(racks[name])]
    pairs = list(itertools.combinations(names, 2))
    bad = [(a, b) for a, b in pairs if not computed.survives(racks[a] + racks[b])]
    if not 1 < len(names) < len(domains):
        assert "rack" not in text
    elif fatal:
        but = "not:" if len(fatal) == len(names) else f"any 1 of {len(names)} racks except"
        assert f"{but} rack {fatal[0]}" in text and "any 1 rack" not in text
    elif not bad:
        assert text.endswith("; any 2 racks")
    else:
        assert f"any 1 rack; not: racks {bad[0][0]} and {bad[0][1]} together" in text.replace(
            f"any 1 rack; {len(pairs) - len(bad):,} of {len(pairs):,} pairs of racks", "any 1 rack"
        )
        assert (f"{len(pairs) - len(bad):,} of {len(pairs):,} pairs of racks" in text) == (len(bad) < len(pairs))


def test_a_domain_that_holds_more_of_a_group_than_may_be_lost_is_named() -> None:
    def close(scheme: str, domains: str) -> list[str]:
        topology = layout(*[1] * len(domains))
        return too_close(topology, place(topology, parse(scheme), [(d,) for d in domains]), {"rack": domains})

    assert close("copy", "AAAABBBB") == []
    assert close("rs:2+2", "AABB") == []
    assert close("xor:4", "AABC") == ["rack A holds 2 nodes of a group that may lose 1"]
    assert close("none", "AABB") == []
