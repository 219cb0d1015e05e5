"""A rank that the others wait for: log, events, heartbeats and metrics name it, its phase, and how late it was."""

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

from mlflash import Checkpointer
from mlflash.telemetry.heartbeat import read_heartbeats
from mlflash.telemetry.prometheus_metrics import _Collector

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SLOW, LATE_S, SAVES = SIZE - 1, 0.5, 4
ON_ODD = pytest.param("training", marks=pytest.mark.skipif(SIZE % 2 == 0, reason="runs on an odd number of ranks"))
ON_EVEN = pytest.param("checksums", marks=pytest.mark.skipif(SIZE % 2 == 1, reason="runs on an even number of ranks"))

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(SIZE > 4, reason="more ranks are late by themselves on two cores"),
    pytest.mark.parametrize("options", ["p2p"], indirect=True),
]


def metrics(memory: Path) -> str:
    registry = CollectorRegistry()
    registry.register(_Collector("t", lambda: read_heartbeats(str(memory), "t")))
    return generate_latest(registry).decode()


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
        (mine,) = [one for one in read_heartbeats(options["memory"], "t").heartbeats if one["rank"] == RANK]
        shown = metrics(root / f"node{SLOW}")
    assert (mine["slowest"], mine["slowest_in"], mine["slowest_on"]) == (SLOW, phase, f"node{SLOW}")
    assert mine["slowest_s"] > LATE_S / 2
    assert (mine["late_s"] > LATE_S / 2) == (RANK == SLOW)
    assert f'mlflash_late_seconds{{job_name="t",node="node{SLOW}",phase="{phase}",rank="{SLOW}"}}' in shown
    said = [record.getMessage() for record in caplog.records if "commits wait" in record.getMessage()]
    assert len(said) == (RANK == 0) and all(f"commits wait for rank {SLOW} on node{SLOW}: " in one for one in said)
    if RANK == 0:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        commits = [line for line in lines if line["event"] == "commit"]
        late = [line["late_s"] for line in commits if (line.get("slowest"), line.get("late_in")) == (SLOW, phase)]
        assert len(late) >= 3 and min(late) > LATE_S / 4
