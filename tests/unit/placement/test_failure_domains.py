"""Failure domains: host lists, what a user names, and what Slurm knows, as its plugins write it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflash.errors import ConfigError
from mlflash.placement.failure_domains import (
    LONGEST_NAME,
    MOST_HOSTS,
    Domains,
    ask_slurm,
    discover,
    expand_hosts,
    from_argument,
    from_lines,
    from_scontrol,
    from_slurm_address,
    join,
)

# Host lists

LITERALS = st.text("abcxyz-_.", min_size=1, max_size=5)


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """What stands in brackets, and the numbers it means."""
    written, meant = [], []
    for _ in range(draw(st.integers(1, 3))):
        width, low, more = draw(st.integers(1, 5)), draw(st.integers(0, 1200)), draw(st.integers(0, 4))
        numbers = [str(n).zfill(max(width, len(str(low)))) for n in range(low, low + more + 1)]
        written.append(numbers[0] if more == 0 else f"{numbers[0]}-{numbers[-1]}")
        meant += numbers
    return f"[{','.join(written)}]", meant


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A host list, and the hosts it means."""
    written, meant = [], []
    for _ in range(draw(st.integers(0, 4))):
        text = draw(LITERALS)
        hosts = [text]
        for _ in range(draw(st.integers(0, 2))):
            (ranges, numbers), end = draw(brackets()), draw(st.just("") | LITERALS)
            text += ranges + end
            hosts = [host + number + end for host in hosts for number in numbers]
        written.append(text)
        meant += hosts
    return ",".join(written), meant


@given(host_lists())
def test_a_host_list_becomes_the_hosts_it_was_made_of(both: tuple[str, list[str]]) -> None:
    written, meant = both
    assert list(expand_hosts(written)) == meant


@pytest.mark.parametrize(
    "text",
    [
        "n[1", "n1]", "n[]", "n[1-]", "n[-1]", "n[3-1]", "n[1,,2]", "n[a-b]", "n[[1]]", "a,,b", ",a", "a,", "a b",
        "n[1 -2]", "n[٣]",
    ],
)  # fmt: skip
def test_what_is_no_host_list_is_refused_as_a_whole(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_hosts(f"good,{text}", "rack.txt, line 3")
    assert "rack.txt, line 3: no host list" in str(caught.value) and repr(f"good,{text}") in str(caught.value)


def test_too_many_hosts_and_too_long_names_are_refused_before_they_are_made() -> None:
    assert len(expand_hosts("n[1-100000]")) == MOST_HOSTS and expand_hosts("a" * LONGEST_NAME)
    start = time.process_time()
    too_long = ["a" * (LONGEST_NAME + 1), "a" * LONGEST_NAME + "[1]", "[0]" * (LONGEST_NAME + 1)]
    too_many = ["n[0-100000]", "n[1-99999],a,b", "n[0-999999999999999999]", "[0-9999][0-9999]" * 9, "[1-2]" * 200]
    for text in (*too_long, *too_many):
        with pytest.raises(ConfigError, match="at most 100000 of at most 255 characters"):
            expand_hosts(text)
    assert time.process_time() - start < 5


# What a user names

TREE = ("switch", "leaf switch")


def own(host: str, *names: str, kinds: tuple[str, ...] = TREE) -> tuple[str, Domains]:
    """What one node says of itself."""
    return host, Domains(kinds[-len(names) :], {host: names})


def test_unknown_hosts_are_domains_of_their_own_at_each_level() -> None:
    domains = Domains(TREE, {"n1": ("s0", "s1")})
    assert domains.names("n2") == ("node n2", "node n2") != domains.names("n3")
    assert Domains((), {}).names("n1") == ()


def test_levels_are_aligned_at_the_innermost() -> None:
    deep = ("switch", "switch", "leaf switch")
    joined = join([own("a", "s5"), own("b", "s0", "s4", "s5", kinds=deep), own("c", "s4", "s6")])
    assert joined == Domains(deep, {"a": ("s5", "s5", "s5"), "b": ("s0", "s4", "s5"), "c": ("s4", "s4", "s6")})


def test_lines_name_domains_by_their_paths() -> None:
    domains = from_lines("""
        # host    row  rack
        levels:   row  rack
        n[01-02]  A    1    # by the door
        n03,gpu1  A    2

        n04       B    1
    """)
    assert domains.kinds == ("row", "rack")
    assert domains.of == {
        "n01": ("A", "A/1"), "n02": ("A", "A/1"), "n03": ("A", "A/2"), "gpu1": ("A", "A/2"), "n04": ("B", "B/1"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "expected", "found"),
    [
        ("n1 a b\nn2 c", 2, "2 after the host (level-1 domain, level-2 domain), as in f, line 1", "1 (c)"),
        ("levels: row rack\n\nn1 a", 3, "2 after the host (row, rack), as in the line 'levels:'", "1 (a)"),
        ("n1 a\nn2 b c", 2, "1 after the host (domain), as in f, line 1", "2 (b c)"),
        ("# empty\nn1", 2, "1 after the host (domain)", "0 ()"),
        ("n[1-3] A 1\nn3 A 2", 2, "A/1, as in f, line 1", "A/2"),
        ("n1 A/1 2", 1, "'/' in the innermost domain only", "A/1 2"),
        ("n1 a\nlevels: rack", 2, "'levels: NAME ...' once, first", "levels: rack"),
        ("levels:\nn1 a", 1, "'levels: NAME ...' once, first", "levels:"),
        ("levels: a\nlevels: b\nn1 a", 2, "'levels: NAME ...' once, first", "levels: b"),
        ("n1 a\nn[1-] b", 2, "names such as node[001-016],gpu1: at most 100000 of at most 255 characters", "'n[1-]'"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected_and_found(text: str, line: int, expected: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_lines(text, "f")
    assert str(caught.value).startswith(f"f, line {line}")
    assert (caught.value.expected, caught.value.found) == (expected, found)


@given(st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from("123")), min_size=1, max_size=12))
def test_two_hosts_share_a_domain_exactly_where_all_columns_up_to_it_agree(places: list[tuple[str, str]]) -> None:
    of = from_lines("\n".join(f"n{i} {row} {rack}" for i, (row, rack) in enumerate(places))).of
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            assert (of[f"n{i}"][0] == of[f"n{j}"][0]) == (a[0] == b[0])
            assert (of[f"n{i}"][1] == of[f"n{j}"][1]) == (a == b)


def test_errors_in_a_file_name_it(tmp_path: Path) -> None:
    file = tmp_path / "racks"
    file.write_text("n1 r1\nn1 r2\n")
    with pytest.raises(ConfigError, match="racks, line 2: host 'n1' has two places"):
        from_argument(file)
    file.write_bytes(b"\xff\xfe")
    for path in (file, tmp_path / "none", tmp_path, "a\0b"):
        with pytest.raises(ConfigError, match="cannot read the failure domains in"):
            from_argument(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda host: host, "a path, or a mapping"),
        (7, "a path, or a mapping"),
        ([("n1", "r1")], "a path, or a mapping"),
        ({}, "domains: no host is named"),
        ({"n1": 7}, "domains['n1'] is no name"),
        ({"n1": ("a", " ")}, "domains['n1'] is no name"),
        ({3: "a"}, "domains[3] is no name"),
        ({"n1": ("a", "b"), "n2": "a"}, "domains['n2']\n  expected: 2 after the host"),
        ({"n1": ()}, "domains['n1']\n  expected: 1 after the host"),
        ({"n[1-2]": "a", "n2": "b"}, "domains['n2']: host 'n2' has two places"),
    ],
)
def test_any_other_argument_is_refused(value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_argument(value)
    assert text in str(caught.value)


# What Slurm knows

TWO_LEVELS = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=dev[0-5]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=dev[6-11]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=dev[12-17]
SwitchName=s3 Level=1 LinkSpeed=1 Nodes=dev[0-17] Switches=s[0-2]
"""
# An upper switch with one child, and a leaf that hangs from the root.
THREE_LEVELS = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n1
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n2
SwitchName=row1 Level=1 LinkSpeed=1 Nodes=n1 Switches=leaf1
SwitchName=row2 Level=1 LinkSpeed=1 Nodes=n2 Switches=leaf2
SwitchName=root Level=2 LinkSpeed=1 Nodes=extra[0-1],n[1-2] Switches=leaf3,row[1-2]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=extra[0-1]
"""
# Three levels: blocks of two, of four, and all; the last aggregate of four is not full.
AGGREGATED = """\
BlockName=b1 BlockIndex=0 Nodes=10.0.0.1,10.0.0.2 BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=10.0.0.3,10.0.0.4 BlockSize=2
BlockName=b3 BlockIndex=2 Nodes=10.0.0.5,10.0.0.6 BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 BlockSize=4
AggregatedBlock=b3 BlockIndex=4 Nodes=10.0.0.5,10.0.0.6 BlockSize=4
AggregatedBlock=b[1-3] BlockIndex=5 Nodes=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4,10.0.0.5,10.0.0.6 BlockSize=8
"""


@pytest.mark.parametrize(
    ("addr", "pattern", "kinds", "names"),
    [
        ("s0.s4.n1", "switch.switch.node", TREE, ("s0", "s4")),
        ("root.row.s4.n1", "switch.switch.switch.node", ("switch", "switch", "leaf switch"), ("root", "row", "s4")),
        ("s4.n1", "switch.node", ("switch",), ("s4",)),
        ("b8.n1", "block.node", ("block",), ("b8",)),
        ("s[1-2].s5.n1", "switch.switch.node", TREE, ("s[1-2]", "s5")),
        ("root..s5.n1", "switch.switch.switch.node", ("switch", "switch", "leaf switch"), ("root", "root", "s5")),
        ("t1:0:2:5.n1", "torus:x:y:z.node", ("torus",), ("t1",)),
    ],
)
def test_an_address_gives_a_domain_for_each_level(
    addr: str, pattern: str, kinds: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert from_slurm_address(addr, pattern) == Domains(kinds, {"n1": names})


@pytest.mark.parametrize(
    ("addr", "pattern"),
    [
        ("n1", "switch.node"), ("s0.", "switch.node"), ("s0.n1", "switch.switch"), ("s0.n1", ".node"), ("n1", ""),
        ("", "node"),
    ],
)  # fmt: skip
def test_an_address_that_does_not_follow_its_pattern_is_refused(addr: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_TOPOLOGY_ADDR does not follow"):
        from_slurm_address(addr, pattern)
    assert discover({"SLURM_TOPOLOGY_ADDR": addr, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}, "n1") is None


@pytest.mark.parametrize("node", ["n1", "n1.cluster"])
@pytest.mark.parametrize("host", ["n1", "n1.cluster"])
def test_a_node_finds_its_own_address_under_its_own_name(node: str, host: str) -> None:
    env = {"SLURM_TOPOLOGY_ADDR": f"s0.s4.{node}", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert discover(env, host) == Domains(TREE, {host: ("s0", "s4")})


def test_scontrol_of_a_tree_with_three_levels_and_a_leaf_at_the_root() -> None:
    domains = from_scontrol(THREE_LEVELS)
    assert domains.kinds == ("switch", "switch", "leaf switch")
    assert domains.of == {
        "n1": ("root", "row1", "leaf1"), "n2": ("root", "row2", "leaf2"),
        "extra0": ("root", "root", "leaf3"), "extra1": ("root", "root", "leaf3"),
    }  # fmt: skip


def test_scontrol_of_aggregated_blocks() -> None:
    domains = from_scontrol(AGGREGATED)
    assert domains.kinds == ("aggregated block", "aggregated block", "block")
    assert domains.of["10.0.0.3"] == ("b[1-3]", "b[1-2]", "b2")
    assert domains.of["10.0.0.5"] == ("b[1-3]", "b3", "b3")
    lost = "\n".join(line for line in AGGREGATED.splitlines() if "AggregatedBlock=b3" not in line)
    assert from_scontrol(lost).of["10.0.0.5"] == ("b[1-3]", "b[1-3]", "b3")


@pytest.mark.parametrize("line", ["SwitchName=s3 Level=x Nodes=n1", "SwitchName=s3 Level=0 Nodes=n[1-"])
def test_a_bad_line_of_scontrol_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="scontrol show topology, line 5: "):
        from_scontrol(TWO_LEVELS + line)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name, alone in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "scontrol"


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_slurm_is_asked_for_whole_lines(scontrol: Path) -> None:
    script(scontrol, '[ "$*" = "show topology" ] && echo "SwitchName=s$SLURM_TOPO_LEN Level=0 Nodes=n1"')
    assert ask_slurm() == Domains(("switch",), {"n1": ("s1000000",)})


@pytest.mark.parametrize(
    "text", ["exit 1", "echo 'SwitchName=s0 Level=0 Nodes=n1'; exit 1", "echo nothing", "echo 'SwitchName=s Nodes=n['"]
)
def test_slurm_that_cannot_tell_gives_none(scontrol: Path, text: str) -> None:
    script(scontrol, text)
    assert ask_slurm() is None


def test_slurm_that_does_not_answer_is_left_at_the_deadline(scontrol: Path) -> None:
    script(scontrol, "exec /bin/sleep 1000")
    assert ask_slurm(timeout_s=0.2) is None


# Anything


def address(text: str) -> Domains | None:
    addr, _, pattern = text.partition(" ")
    return from_slurm_address(addr, f"switch.{pattern}.node")


@pytest.mark.parametrize("read", [from_lines, from_scontrol, address, expand_hosts])
@given(text=st.lists(st.sampled_from([
    *"n012.:-, []/#ab\"\n", "levels:", "node", "SwitchName=", "AggregatedBlock=", "Level=", "BlockSize=", "Nodes=",
]), max_size=60).map("".join) | st.text(max_size=60))  # fmt: skip
def test_any_text_raises_nothing_but_a_config_error(read: Callable[[str], Any], text: str) -> None:
    try:
        result = read(text)
    except ConfigError:
        return
    if isinstance(result, Domains):
        assert all(len(names) == len(result.kinds) for names in result.of.values())
    elif result is not None:
        assert all(host and not {*host} & {*",[] \n"} for host in result)
