"""Every wait ends: a rank is stopped where others wait for it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from harness import Cluster, Result
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


def test_every_wait_for_a_stopped_rank_ends_and_the_rank_catches_up_or_is_refused(shm: Path, tmp_path: Path) -> None:
    cluster = Cluster(shm, transport="rma")
    spec = {"program": "every_wait", "stop_s": STOP_S, "directory": str(tmp_path)}
    job = cluster.start(3, "faults/stopped_worker.py", json.dumps(spec))
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
    (record,) = [one for one in result.of("close") if one["rank"] == 2]
    assert record["kind"] in ("Closed", "DeadlineExceeded") and record["seconds"] < SLACK_S, "the others are gone"


def test_a_wait_in_the_constructor_for_a_stopped_rank_ends(shm: Path) -> None:
    job = Cluster(shm).start(2, "faults/stopped_worker.py", json.dumps({"program": "constructor", "stop_s": STOP_S}))
    job.wait_for("constructor", 1)
    go_on(job.pids()[1])
    result = job.wait()
    assert result.returncode == 0, result.log
    (record,) = ended_late(result, "constructor", [0])
    assert f"waited {STOP_S:g} s for all 2 ranks to come to Checkpointer()" in record["text"]
