"""Every wait ends: a rank is stopped where others wait for it, or is slow in a restore, and is named."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result, own_memory
from processes import runs, send
from waiting import until

STOP_S = 2.0  # timeout_s of those that wait
SLACK_S = 30.0  # that it may take on a busy machine


def go_on(pid: int) -> None:
    """Let a process go on that has stopped itself, or is about to."""
    until(lambda: not runs(pid), f"process {pid} to stop itself")
    send(signal.SIGCONT, [pid])


def ended_late(result: Result, event: str, ranks: list[int]) -> list[dict[str, Any]]:
    """How a wait ended on some ranks: with a DeadlineExceeded, in time."""
    found = [record for record in result.of(event) if record["rank"] in ranks]
    assert [record["rank"] for record in found] == ranks, found
    for record in found:
        assert record["kind"] == "DeadlineExceeded", record
        assert record["seconds"] < SLACK_S, record
    return found


def test_every_wait_for_a_stopped_rank_ends(shm: Path, tmp_path: Path) -> None:
    cluster = Cluster(shm, transport="rma")
    spec = {"program": "every_wait", "stop_s": STOP_S, "directory": str(tmp_path)}
    job = cluster.start(3, "faults/waits_worker.py", json.dumps(spec))
    for event in ("before a call that blocks", "inside of it", "drain with a timeout"):
        job.wait_for(event, 2)
        go_on(next(record["process"] for record in job.wait_for("courier", 3) if record["rank"] == 2))
    job.wait_for("close", 2)
    go_on(job.pids()[2])
    result = job.wait()
    assert result.returncode == 0, result.log
    for record in ended_late(result, "before a call that blocks", [0, 1]):
        assert record["ranks"] == [2] and f"waited {STOP_S:g} s for rank 2 on node2" in record["text"], record["text"]
    for record in ended_late(result, "inside of it", [0, 1]):
        assert "still inside of Win_create, which returns when all ranks have called it" in record["text"]
    for event in ("drain", "drain with a timeout"):
        for record in ended_late(result, event, [0, 1]):
            said = f"no rank made progress for {3 * STOP_S:g} s; rank 2 on node2 does not answer"
            assert record["ranks"] == [2] and said in record["text"]
    assert sorted((r["rank"], r["step"]) for r in result.of("caught up")) == [
        (rank, step) for rank in range(3) for step in (3, 5, 5)]  # fmt: skip
    for record in ended_late(result, "close", [0, 1]):
        assert record["ranks"] == [2] and f"waited {STOP_S:g} s for rank 2 on node2" in record["text"], record["text"]
    (record,) = [closed for closed in result.of("close") if closed["rank"] == 2]
    assert record["kind"] in ("Closed", "DeadlineExceeded") and record["seconds"] < SLACK_S, "the others are gone"


def test_a_wait_in_the_constructor_for_a_stopped_rank_ends(shm: Path) -> None:
    job = Cluster(shm).start(2, "faults/waits_worker.py", json.dumps({"program": "constructor", "stop_s": STOP_S}))
    job.wait_for("constructor", 1)
    go_on(job.pids()[1])
    result = job.wait()
    assert result.returncode == 0, result.log
    (record,) = ended_late(result, "constructor", [0])
    assert f"waited {STOP_S:g} s for all 2 ranks to come to Checkpointer()" in record["text"]


# A rank that keeps the others waiting in a restore is named within seconds, and in the error at the deadline


TIMEOUT_S = 6.0
SLACK_S = 30.0  # that it may take on a busy machine


def run(shm: Path, program: str, directory: Path, **spec: Any) -> Result:
    """Start a job whose memory is empty."""
    given = {"program": program, "directory": str(directory), **spec}
    return Cluster(shm, job=program).run(4, "faults/waits_worker.py", json.dumps(given))


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
def test_a_rank_that_holds_up_a_restore_is_named(shm: Path, drained: Path, slow: int, how: str, does: str) -> None:
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
