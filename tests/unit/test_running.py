"""Who sits where, when to start again, and what is read of Slurm: the pure parts of `mlflash run`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlflash.running.command import run
from mlflash.running.on_slurm import is_lost
from mlflash.running.policy import Restarts
from mlflash.running.seats import Seats, reseat, take_seats

HOSTS = [f"n{number}" for number in range(8)]


def test_the_first_nodes_that_are_fit_are_taken() -> None:
    assert take_seats(["c", "a", "b"], 2, 4) == Seats(("c", "a"), 4)
    assert take_seats(["a"], 2, 1) is None and take_seats(["a"], 2, 1, least=1) == Seats(("a",), 1)
    assert list(Seats(("a", "b"), 2).hosts_of_ranks()) == ["a", "a", "b", "b"] and Seats(("a", "b"), 2).ranks == 4


@pytest.mark.parametrize(
    ("fit", "least", "hosts"),
    [
        ("acde", 0, "adc"),  # a spare takes the place of b
        ("abcde", 0, "abc"),
        ("de", 0, None),
        ("de", 2, "de"),
        ("ac", 2, "ac"),  # ranks have other numbers: training that reshards
        ("c", 2, None),
    ],
)
def test_who_can_stay_stays_and_spares_take_the_other_seats(fit: str, least: int, hosts: str | None) -> None:
    before = Seats(tuple("abc"), 2)
    assert reseat(before, list(fit), 3, least) == (None if hosts is None else Seats(tuple(hosts), 2))


def test_a_run_that_got_smaller_grows_again() -> None:
    assert reseat(Seats(("a", "c"), 1), ["a", "b", "c"], 3, 2) == Seats(("a", "c", "b"), 1)


@given(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=5, unique=True), st.sets(st.sampled_from(HOSTS)))
def test_nobody_sits_twice_and_nobody_moves_without_need(taken: list[str], fit: set[str]) -> None:
    before = Seats(tuple(taken), 1)
    after = reseat(before, sorted(fit), len(taken))
    assert (after is None) == (len(fit) < len(taken))
    if after is not None:
        assert len({*after.hosts}) == len(taken) and {*after.hosts} <= fit
        assert all(new == old for new, old in zip(after.hosts, before.hosts, strict=True) if old in fit)


def test_it_is_started_again_as_long_as_it_gets_on() -> None:
    restarts = Restarts(most=10)
    for newest in (5, 9, 12):
        assert restarts.after_failure(newest, node_lost=False) == ""
        assert restarts.pause_s == 1
    assert "failed 2 times after step 12" in restarts.after_failure(12, node_lost=False)


def test_a_lost_node_is_no_fault_of_the_training() -> None:
    restarts = Restarts(most=3)
    assert [restarts.after_failure(5, node_lost=True) for _ in range(3)] == [""] * 3 and restarts.pause_s == 0
    assert "3 of 3 restarts" in restarts.after_failure(5, node_lost=True)


def test_a_training_that_never_gets_to_a_checkpoint_has_two_tries() -> None:
    restarts = Restarts(most=10)
    assert restarts.after_failure(None, node_lost=False) == ""
    assert "before the first checkpoint" in restarts.after_failure(None, node_lost=False)


@pytest.mark.parametrize("state", ["down", "down*", "allocated*", "idle*", "fail", "DOWN", "unknown"])
def test_a_node_that_is_out_of_service_is_lost(state: str) -> None:
    assert is_lost(state)


@pytest.mark.parametrize(
    "state", ["allocated", "idle", "mixed", "mixed-", "allocated$", "draining", "drained", "completing"]
)
def test_one_that_trains_goes_on_whatever_else_slurm_says(state: str) -> None:
    assert not is_lost(state)


def test_a_mistyped_option_is_no_command() -> None:
    told = CliRunner().invoke(run, ["-N", "2", "--spare", "1", "--", "true"])
    assert told.exit_code == 2 and "--spare" in told.output
