"""Lightning's own checkpoints, moved to their place behind training: the same files, and stock Lightning resumes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
from frameworks.test_lightning import content, listing
from harness import Cluster, Result
from waiting import until

ENV = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(sys.path)}
pytestmark = [needs.MPI, pytest.mark.slow, pytest.mark.timeout(300)]  # most of it imports


def train(cluster: Cluster, folder: Path, last: int, how: str, **more: Any) -> Result:
    folder.mkdir(exist_ok=True)
    spec = json.dumps({"folder": str(folder), "last": last, "how": how, **more})
    return cluster.run(2, "frameworks/lightning_files_job.py", spec, env=ENV, launcher="torchrun", timeout=120)


def losses(result: Result) -> dict[tuple[int, int], float]:
    return {(one["rank"], one["step"]): one["loss"] for one in result.of("loss")}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_lightning_resumes_from_what_came_to_its_place_though_all_were_killed(shm: Path, kind: str) -> None:
    cluster, folder = Cluster(shm), shm / "run"
    keep = {"save_top_k": 1, "monitor": "metric", "mode": "min", "save_last": "link"}
    killed = train(cluster, folder, 6, "background", kind=kind, keep=keep, die=4, drain_rate=40_000.0)
    assert not killed.of("end")
    name = "at-step=4.ckpt"
    assert all(name not in one["there"] for one in killed.of("step") if one["step"] == 4), "it was still in memory"
    until(lambda: listing(folder).get("last.ckpt") == name, lambda: f"a link to {name} in {listing(folder)}")
    whole = train(cluster, shm / "whole", 4, "stock", kind=kind, keep=keep)
    assert content(folder / name) == content(shm / "whole" / name), whole.log
    again = train(cluster, folder, 6, "stock", kind=kind, keep=keep, resume=name)
    assert {step for _, step in losses(again)} == {5, 6}, again.log
