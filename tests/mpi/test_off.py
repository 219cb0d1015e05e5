"""Off on all ranks: no rank waits for another, nothing is looked at or written, and the first one says so."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlflash import Checkpointer
from mlflash.checkpointer import off

pytestmark = [pytest.mark.mpi(min_size=2)]


@pytest.fixture(params=["argument", "environment"])
def more(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What turns a Checkpointer off."""
    monkeypatch.setattr(off, "_logged", set())
    if request.param == "environment":
        monkeypatch.setenv("MLFLASH_DISABLE", "1")
    return {"enabled": request.param == "environment"}


def test_no_rank_waits_for_another_and_memory_stays_as_it_is(
    comm: Any, options: dict[str, Any], root: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    switch = os.environ.pop("MLFLASH_DISABLE", None)
    with Checkpointer(comm=comm, **options) as ckpt:
        ckpt.save(4, {"a": np.full(9, comm.rank)}).wait()
    if switch is not None:
        monkeypatch.setenv("MLFLASH_DISABLE", switch)
    comm.Barrier()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    comm.Barrier()
    threads = set(threading.enumerate())
    patient = {**options, **more, "timeout_s": 3600.0}  # no wait would end
    if comm.rank % 2 == 0:  # what would be collective is not
        state = {"a": np.full(9, -1.0)}
        with Checkpointer(root / "directory", comm=comm, drain_every=1, **patient) as idle:
            assert idle.restore(state) is None and idle.load() == (None, None) and idle.steps() == []
            for step in (1, 5, 2):
                assert idle.save(step, state).wait().skipped
            assert idle.drain().wait().done and idle.scavenge() is None and idle.reprotect() is None
            idle.prepare(state), idle.wait(), idle.wait_drained()
            assert idle.report()["rank"] == comm.rank and (state["a"] == -1.0).all()
    assert set(threading.enumerate()) <= threads
    comm.Barrier()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    comm.Barrier()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["mlflash is off" in text for text in warnings] == [True] * (comm.rank == 0)
    monkeypatch.delenv("MLFLASH_DISABLE", raising=False)
    with Checkpointer(comm=comm, **options) as ckpt:
        assert ckpt.restore({"a": np.zeros(9, dtype=int)}) == 4, "it was off, and is on again"
