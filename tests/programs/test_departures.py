"""A rank leaves its job while others go on, without a launcher that would end them; couriers are processes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT, PlainRanks
from processes import left_here
from waiting import PATIENCE_S, until

pytestmark = needs.MPI


@pytest.fixture
def start(shm: Path) -> Iterator[Any]:
    started: list[PlainRanks] = []

    def begin(size: int, how: str) -> PlainRanks:
        settings = {"memory": str(shm), "job": "j", "timeout_s": PATIENCE_S}
        spec = json.dumps({"program": "one_leaves", "settings": settings, "how": how})
        started.append(PlainRanks(shm, size, [sys.executable, str(SUPPORT / "courier_worker.py"), spec]))
        return started[-1]

    yield begin
    for one in started:
        one.close()
    until(lambda: not left_here(), "agents and couriers to end")


@pytest.mark.parametrize("how", ["raises", "interrupted"])
def test_an_exception_on_one_rank_ends_the_others_which_wait_for_it_for_ever(start: Any, how: str) -> None:
    job = start(3, how)
    alone = -signal.SIGINT if how == "interrupted" else 1  # Python ends by the signal
    assert job.wait() == [1, alone, 1], job.log
    said = [record["text"] for record in job.records("log") if record["level"] == "ERROR"]
    name = "KeyboardInterrupt" if how == "interrupted" else "ValueError: a fault of the training"
    assert [text for text in said if f"rank 1 has left the job: {name}" in text and "ends, too" in text] == said
    assert len(said) == 2 and not [record for record in job.records("log") if record["rank"] == 1]


@pytest.mark.parametrize("how", ["killed", "terminated", "hung up", "exits at once", "executes"])
def test_who_ends_without_a_word_is_missed_at_once_and_named_and_the_others_train_on(start: Any, how: str) -> None:
    job = start(3, how)
    assert [job.processes[rank].wait(PATIENCE_S) for rank in (0, 2)] == [0, 0], job.log
    assert sorted((record["rank"], record["held"]) for record in job.records("end")) == [(0, 0), (2, 0)]
    for record in job.records("failed"):
        assert "rank 1 has left the job" in record["why"]
    said = [record["text"] for record in job.records("log") if record["level"] == "WARNING"]
    assert sum("nothing is saved any more: rank 1 has left the job" in text for text in said) == 2, said
