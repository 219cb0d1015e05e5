"""What a layout survives is computed, and is right: compared with trying every loss."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.layouts import SCHEMES, layout

from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.survival import Survival, describe, of, too_close


def survival(scheme: str, *sizes: int) -> Survival:
    topology = layout(*sizes)
    return of(topology, place(topology, parse(scheme)))


@pytest.mark.parametrize("scheme", SCHEMES)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=8))
def test_the_count_of_losses_survived_is_that_of_trying_each(scheme: str, sizes: list[int]) -> None:
    found = survival(scheme, *sizes)
    nodes = len(sizes)
    counted = [sum(found.survives(lost) for lost in itertools.combinations(range(nodes), n)) for n in range(nodes + 1)]
    assert found.surviving(nodes) == counted
    assert found.any_nodes == max(n for n in range(nodes + 1) if counted[n] == math.comb(nodes, n))
    assert found.any_nodes == min(parse(scheme).losses, nodes - 1)
    for losses in range(nodes + 1):
        assert found.chance(losses) == counted[losses] / math.comb(nodes, losses)


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
    found = of(topology, place(topology, parse(scheme), [(name,) for name in domains]))
    text = describe(found, {"rack": domains})
    names = sorted(set(domains), key=domains.index)
    racks = {name: [node for node, there in enumerate(domains) if there == name] for name in names}
    fatal = [name for name in names if not found.survives(racks[name])]
    pairs = list(itertools.combinations(names, 2))
    bad = [(a, b) for a, b in pairs if not found.survives(racks[a] + racks[b])]
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
