"""Failure domains that a user names, and what nodes say put together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflash.errors import ConfigError
from mlflash.placement.failure_domains import Domains, from_argument, from_lines, join

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


@given(st.text("n12[]-, /#ab\nlevels:", max_size=60) | st.text(max_size=60))
def test_lines_of_any_text_raise_nothing_but_a_config_error(text: str) -> None:
    try:
        domains = from_lines(text)
    except ConfigError:
        return
    assert domains.of and all(len(names) == len(domains.kinds) for names in domains.of.values())


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
