"""Host lists: all of one is read, or it is refused."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflash.errors import ConfigError
from mlflash.placement.failure_domains import LONGEST_NAME, MOST_HOSTS, expand_hosts

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


def test_written_out_hosts_stay_what_they_are() -> None:
    hosts = expand_hosts("n[001-003,007],gpu1,x[0-1]y[0-2]")
    assert hosts == ("n001", "n002", "n003", "n007", "gpu1", "x0y0", "x0y1", "x0y2", "x1y0", "x1y1", "x1y2")
    assert expand_hosts(",".join(hosts)) == hosts
    assert expand_hosts("n[8-11]") == ("n8", "n9", "n10", "n11")
    assert expand_hosts("n[098-101]") == ("n098", "n099", "n100", "n101")
    assert expand_hosts("n[98-101]") == ("n98", "n99", "n100", "n101")
    assert expand_hosts("10.0.0.1,n1.cluster") == ("10.0.0.1", "n1.cluster")
    assert expand_hosts("") == ()


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


def test_too_many_hosts_are_refused_before_they_are_made() -> None:
    assert len(expand_hosts("n[1-100000]")) == MOST_HOSTS
    start = time.process_time()
    for text in ("n[0-100000]", "n[1-99999],a,b", "n[0-999999999999999999]", "[0-9999][0-9999]" * 9, "[1-2]" * 200):
        with pytest.raises(ConfigError, match="at most 100000"):
            expand_hosts(text)
    assert time.process_time() - start < 5


def test_names_longer_than_any_host_are_refused() -> None:
    assert expand_hosts("a" * LONGEST_NAME)
    for text in ("a" * (LONGEST_NAME + 1), "a" * LONGEST_NAME + "[1]", "[0]" * (LONGEST_NAME + 1)):
        with pytest.raises(ConfigError, match="at most 255 characters"):
            expand_hosts(text)


@given(st.text("n0123-,[]. \n", max_size=40) | st.text(max_size=40))
def test_any_other_text_raises_nothing_but_a_config_error(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ConfigError:
        return
    assert all(host and not set(host) & set(",[] \n") for host in hosts)
