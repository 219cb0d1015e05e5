"""The event log of real ranks: every verb has its line, and the numbers are those that the verbs gave."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from prometheus_client import CollectorRegistry, generate_latest
from waiting import take

from mlflash import Checkpointer, errors
from mlflash.telemetry.heartbeat import read_heartbeats
from mlflash.telemetry.metrics import Collector, NodeMetrics

pytestmark = pytest.mark.mpi
two = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.full(100_000 + RANK, float(step))}


def own_events(path: Path) -> list[dict[str, Any]]:
    """This rank's, from the file of its node; nodes have one rank each."""
    own = path.with_suffix(f".node{RANK}.jsonl") if RANK else path
    lines = [json.loads(line) for line in own.read_text().splitlines()]
    assert {line["rank"] for line in lines} == {RANK}
    return lines


def of(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [line for line in events if line["event"] in kinds]


def test_each_verb_has_its_line_and_a_relaunch_appends(options: dict[str, Any], root: Path) -> None:
    path, directory = root / "log" / "run.jsonl", root / "drained"
    with Checkpointer(directory, log=path, drain_every=2, **options) as ckpt:
        ckpt.restore(state_at(0))
        snapshots = []
        for step in (1, 2):
            snapshots.append(ckpt.save(step, state_at(step)).wait())
            ckpt.wait_drained()
        ckpt.wait()
        report, survives = ckpt.report(), ckpt.survives
    events = own_events(path)
    (start,) = of(events, "start")
    assert (start["ranks"], start["nodes"]) == (SIZE, [f"node{rank}" for rank in range(SIZE)])
    assert (start["job"], start["redundancy"], start["partners"]) == ("t", report["scheme"], list(report["partners"]))
    assert start["survives"] == (survives if RANK == 0 else "")
    for kind in ("save", "protect", "commit"):
        assert [line["step"] for line in of(events, kind)] == [1, 2]
    for snapshot, save, commit in zip(snapshots, of(events, "save"), of(events, "commit"), strict=True):
        assert (save["seconds"], save["nbytes"]) == (round(snapshot.stall_s, 6), snapshot.nbytes)
        assert 0 < commit["seconds"] <= snapshot.commit_s
    assert [line["peers"] for line in of(events, "protect")] == [[r for r in report["group"] if r != RANK]] * 2
    (drain,) = of(events, "drain")
    assert (drain["step"], drain["path"], drain["error"]) == (2, report["drain"]["path"], None)
    assert drain["nbytes"] == report["drain"]["nbytes"] > 0
    held = sum(file.stat().st_size for file in Path(report["memory"]).glob("slot-*"))
    assert of(events, "memory")[-1]["nbytes"] == held
    assert [line["state"] for line in of(events, "end")] == ["ended"] and events[-1]["event"] == "end"

    with Checkpointer(directory, log=path, **options) as ckpt:
        assert ckpt.restore(state_at(0)) == 2
        ckpt.steps()  # behind the reprotection
    appended = own_events(path)
    assert appended[: len(events)] == events
    (restore,) = of(appended, "restore")
    assert (restore["step"], restore["source"], restore["from"]) == (2, "memory", f"node{RANK}")
    assert restore["seconds"] > 0 and restore["nbytes"] > 800_000
    (reprotect,) = of(appended, "reprotect")
    assert reprotect["step"] == 2 and not reprotect["made"]
    assert len({line["run"] for line in appended}) == 2
    assert len(set(MPI.COMM_WORLD.allgather(appended[-1]["run"]))) == 1, "all ranks name a launch alike"


@two
def test_what_does_not_become_a_checkpoint_says_why_on_all_ranks(options: dict[str, Any], root: Path) -> None:
    path = root / "run.jsonl"
    with Checkpointer(log=path, **options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        snapshot = None
        try:
            snapshot = ckpt.save(2, {"w": object() if RANK == SIZE - 1 else state_at(2)["w"]})
        except errors.StateError:
            assert RANK == SIZE - 1
        if snapshot is not None:
            with pytest.raises(errors.SaveFailed):
                snapshot.wait()
        ckpt.wait()
    events = own_events(path)
    (fail,) = of(events, "fail")
    assert fail["step"] == 2 and f"rank {SIZE - 1}" in fail["why"]
    assert [line["step"] for line in of(events, "commit")] == [1]
    warned = [line["text"] for line in of(events, "warning")]
    assert any("step 2 was not saved" in text for text in warned) == (RANK in (0, SIZE - 1))


def test_a_run_that_is_left_by_an_exception_has_failed(options: dict[str, Any], root: Path) -> None:
    path = root / "run.jsonl"
    with pytest.raises(ZeroDivisionError), Checkpointer(log=path, **options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        raise ZeroDivisionError
    MPI.COMM_WORLD.Barrier()
    (end,) = of(own_events(path), "end")
    assert end["state"] == "failed"


# A rank that the others wait for: log, events, heartbeats and metrics name it, its phase, and how late it was

SLOW, LATE_S, SAVES = SIZE - 1, 0.5, 4
ON_ODD = pytest.param("training", marks=pytest.mark.skipif(SIZE % 2 == 0, reason="runs on an odd number of ranks"))
ON_EVEN = pytest.param("checksums", marks=pytest.mark.skipif(SIZE % 2 == 1, reason="runs on an even number of ranks"))


def metrics(memory: Path) -> str:
    registry = CollectorRegistry()
    registry.register(Collector(NodeMetrics("t", lambda: read_heartbeats(str(memory), "t"))))
    return generate_latest(registry).decode()


@two
@pytest.mark.skipif(SIZE > 4, reason="more ranks are late by themselves on two cores")
@pytest.mark.parametrize("options", ["p2p"], indirect=True)
@pytest.mark.parametrize("phase", [ON_ODD, ON_EVEN])
def test_a_slow_rank_is_named_with_its_phase_and_warned_of_once(
    options: dict[str, Any], root: Path, phase: str, slow_at: Callable[[str, float], object],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING, "mlflash")
    log = root / "run.jsonl"
    with Checkpointer(log=log, **options) as ckpt:
        ckpt.prepare({"w": np.zeros(1000)})
        if RANK == SLOW and phase == "checksums":
            slow_at("protect.announced", LATE_S)
        for step in range(SAVES):
            if RANK == SLOW and phase == "training":
                take(LATE_S)
            ckpt.save(step, {"w": np.full(1000, float(step))}).wait()
        ckpt.wait()
        MPI.COMM_WORLD.Barrier()
        (own,) = [beat for beat in read_heartbeats(options["memory"], "t").heartbeats if beat["rank"] == RANK]
        shown = metrics(root / f"node{SLOW}")
    assert (own["slowest"], own["slowest_in"], own["slowest_on"]) == (SLOW, phase, f"node{SLOW}")
    assert own["slowest_s"] > LATE_S / 2
    assert (own["late_s"] > LATE_S / 2) == (RANK == SLOW)
    assert f'mlflash_late_seconds{{job_name="t",node="node{SLOW}",phase="{phase}",rank="{SLOW}"}}' in shown
    warnings = [record.getMessage() for record in caplog.records if "commits wait" in record.getMessage()]
    assert len(warnings) == (RANK == 0) and all(
        f"commits wait for rank {SLOW} on node{SLOW}: " in text for text in warnings
    )
    if RANK == 0:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        commits = [line for line in lines if line["event"] == "commit"]
        late = [line["late_s"] for line in commits if (line.get("slowest"), line.get("late_in")) == (SLOW, phase)]
        assert len(late) >= 3 and min(late) > LATE_S / 4
