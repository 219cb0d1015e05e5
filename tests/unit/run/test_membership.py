"""Who has which rank of a training that goes on where processes are lost, by a clock of ours."""

from __future__ import annotations

import pytest
from unit.membership_job import Job


def test_one_that_does_not_leave_in_time_is_killed_and_replaced() -> None:
    job = Job("a b c", "d e")
    job.end("b0")
    job.leave("a0")
    assert job.it.until == job.now + 30
    job.later(29)
    assert not job.killed
    job.later(1)
    assert job.killed == ["c0"] and job.notes == [("late", {"round": 1, "rank": 2, "phase": "leaving"})]
    job.later(119)
    assert job.killed == ["c0"]
    job.later(1)
    assert job.killed == ["c0", "c0"]  # its agent may not have heard it
    job.end("c0")
    assert job.it.round == 2 and job.seats()["e0"] == "2: 2"


def test_who_waits_in_a_round_for_one_that_does_not_come_is_not_killed_with_it() -> None:
    job = Job("a b c", "d e")
    job.end("b0")
    job.leave("a0", "c0")
    job.it.here("a0", 1)  # of the last round
    for name in ("c0", "d0"):
        job.it.here(name, 2)
    job.later(120)
    assert job.killed == ["a0"]
    job.end("a0")
    job.leave("c0", "d0")
    assert job.it.round == 3
    for name in ("c0", "d0", "e0"):
        job.it.here(name, 3)
    job.train("d0")
    job.later(120)
    assert job.killed == ["a0", "e0", "c0"]  # all are there, and nobody knows for whom two of them wait


def test_it_is_over_when_no_process_is_ready_in_time() -> None:
    job = Job("a b c")
    job.end("b0", code=9, why="it fell")
    job.end("c0", code=8)
    job.later(10)
    job.leave("a0")
    assert job.it.until == job.now + 120
    job.ready("b0.1")
    job.later(119.9)
    assert not job.it.over and job.it.code is None
    job.later(0.1)
    assert job.it.over == "no process was ready in time to take the place of ranks 1, 2 (it fell)" and job.it.code == 9
    assert not job.killed


@pytest.mark.parametrize("code", [3, 0])
def test_a_loss_before_all_have_begun_is_the_end(code: int) -> None:
    job = Job("a b", "c", begins=False)
    job.ready("a0", "b0", "c0")
    job.train("a0")
    job.end("b0", code=code, why="it fell")
    assert job.it.over == "rank 1 (it fell) was lost before all ranks had begun" and job.it.code == (code or 1)


@pytest.mark.parametrize("how", ["one by one", "their host"])
def test_it_is_over_when_all_ranks_are_lost(how: str) -> None:
    job = Job("a a", "c")
    if how == "their host":
        job.lose("a")
    else:
        job.end("a0", code=9, why="a burns")
        job.end("a1", code=8)
    assert job.it.over == "all ranks were lost, the last one ranks 0, 1 (a burns)"
    assert job.it.code == (9 if how == "one by one" else 255)


def test_rounds_that_fail_before_all_have_begun_are_not_tried_for_ever() -> None:
    job = Job("a b", "c d e f g h")
    job.end("b0")
    for name in "cde":
        job.leave("a0")
        job.end(f"{name}0", code=9, why=f"{name} fell")
        assert not job.it.over
    job.leave("a0")
    job.end("f0", why="f fell")
    assert job.it.over == "rank 1 (it was killed) was lost, and 3 rounds had failed before all ranks had begun"
    assert job.it.code == 137 and job.it.round == 5


def test_processes_that_end_before_they_are_ready_are_not_started_for_ever() -> None:
    job = Job("a b")
    job.end("b0")
    job.leave("a0")
    for number in range(1, 4):
        assert len(job.started) == number
        job.end(f"b0.{number}")
    assert len(job.started) == 3 and not job.it.over
    job.later(120)
    assert job.it.over.startswith("no process was ready in time")


def test_who_begins_its_program_anew_is_told_once_more_what_it_was_told() -> None:
    job = Job("a b", "c")
    job.end("b0")
    job.leave("a0")
    job.hears()
    job.it.text("a0", 2, "port", "4000")
    assert job.hears() == {"a0": ["4000"], "c0": ["4000"]}  # over a connection that ends unread
    job.ready("c0")
    assert job.hears() == {"c0": ["2: 1", "4000"]}
    job.train("a0", "c0", step=20)
    job.end("c0")
    job.ready("b0.1")
    job.leave("a0")
    job.hears()
    job.ready("b0.1")
    assert job.hears() == {"b0.1": ["3: 1"]}  # nothing of another round
