"""A rank that keeps the others waiting in a restore is named within seconds, and in the error at the deadline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result, own_memory

TIMEOUT_S = 6.0
SLACK_S = 30.0  # that it may take on a busy machine


def run(shm: Path, program: str, directory: Path, **spec: Any) -> Result:
    """Start a job whose memory is empty."""
    given = {"program": program, "directory": str(directory), **spec}
    return Cluster(shm, job=program).run(4, "faults/slow_restore_worker.py", json.dumps(given))


@pytest.fixture(scope="module")
def drained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a checkpoint."""
    directory = tmp_path_factory.mktemp("drained")
    with own_memory() as shm:
        run(shm, "save", directory)
    yield directory


@pytest.mark.parametrize(("slow", "how", "does"), [
    pytest.param(2, "reads", "reading {}/step-00000001/__2_0.distcp, 0.0 of 0.3 MB", marks=pytest.mark.gate),
    (0, "comes", "not restoring"),
    (3, "loads", "restoring"),
])  # fmt: skip
def test_a_rank_that_others_wait_for_in_a_restore_is_named_in_the_log_and_in_the_error_of_all(
    shm: Path, drained: Path, slow: int, how: str, does: str
) -> None:
    result = run(shm, "restore", drained, timeout_s=TIMEOUT_S, slow=slow, how=how)
    named = f"rank {slow} on node{slow}"
    said = [record for record in result.of("log") if "waiting for" in record["text"]]
    assert {record["rank"] for record in said} == {1 if slow == 0 else 0}, result.log
    text = f"this restore is waiting for {named} ({does.format(drained)}), for "
    assert said[0]["text"].startswith(text) and said[0]["text"].endswith(" s so far"), said
    assert float(said[0]["text"].removeprefix(text).split()[0]) < TIMEOUT_S, said
    ends = result.of("restored")
    assert [record["rank"] for record in ends] == [0, 1, 2, 3], result.log
    for record in ends:
        assert record["step"] is None and record["seconds"] < 2 * TIMEOUT_S + SLACK_S, record
        if how == "reads" or record["rank"] != slow:  # when the others come, nobody waits for them any more
            assert record["kind"] == "DeadlineExceeded" and record["wrong"] == [], record
            assert named in record["text"] and record["ranks"] == [slow], record
