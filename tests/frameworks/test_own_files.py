"""A framework's own checkpoints, moved to disk behind training: the same files, and the framework resumes from them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from harness import Cluster, Result
from waiting import until

ENV = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(sys.path)}
pytestmark = [needs.MPI, pytest.mark.slow, pytest.mark.timeout(500)]  # most of it imports


def train(cluster: Cluster, folder: Path, last: int, how: str, **more: Any) -> Result:
    spec = json.dumps({"folder": str(folder), "last": last, "how": how, **more})
    return cluster.run(2, "frameworks/own_files_job.py", spec, env=ENV, launcher="torchrun", timeout=200)


def losses(result: Result) -> dict[tuple[int, int], float]:
    return {(one["rank"], one["step"]): one["loss"] for one in result.of("loss")}


def content(path: Path) -> Any:
    """What a file says, without what differs from run to run."""
    if path.suffix == ".json":
        said = json.loads(path.read_text())
        for entry in [said, *said.get("log_history", [])]:
            for name in [name for name in entry if "runtime" in name or "per_second" in name]:
                del entry[name]
        return json.loads(json.dumps(said).replace(str(path.parents[1]), "FOLDER"))
    if path.suffix in (".pt", ".pth"):
        return repr(torch.load(path, weights_only=False))
    return b"" if path.suffix == ".bin" else path.read_bytes()  # arguments, with their folders


def checkpoint(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.is_file()}


def test_transformers_finds_the_files_that_it_would_have_written(shm: Path) -> None:
    cluster = Cluster(shm)
    stock, background = (train(cluster, shm / how, 6, how, best=True) for how in ("stock", "background"))
    assert losses(stock) == losses(background) and len(losses(stock)) == 12, background.log
    for folders in (("stock", "background"), ("stock-epochs", "background-epochs")):
        theirs, ours = (sorted((shm / folder).glob("*")) for folder in folders)
        assert [path.name for path in ours] == [path.name for path in theirs] and len(theirs) == 2, background.log
        for one, other in zip(theirs, ours, strict=True):
            expected, found = checkpoint(one), checkpoint(other)
            assert set(found) == set(expected) and len(found) >= 8
            for file in expected:
                assert found[file] == expected[file], file
    told = json.loads((shm / "background-epochs/checkpoint-6/trainer_state.json").read_text())
    assert told["best_model_checkpoint"] == str(shm / "background-epochs/checkpoint-4")
    again, expected = (train(cluster, shm / how, 8, "stock") for how in ("background", "stock"))
    assert losses(again) == losses(expected) and {step for _, step in losses(again)} == {7, 8}, again.log


def test_transformers_checkpoint_comes_to_disk_though_all_are_killed_right_after_its_save(shm: Path) -> None:
    cluster, folder = Cluster(shm), shm / "run"
    killed = train(cluster, folder, 6, "background", die=4, drain_rate=60_000.0)
    assert not killed.of("end")
    saved = [one for one in killed.of("saved") if one["step"] == 4]
    assert saved and all("checkpoint-4" not in one["there"] for one in saved), "it was still in memory"
    until((folder / "checkpoint-4").is_dir, lambda: f"checkpoint-4 in {sorted(folder.iterdir())}")
    again = train(cluster, folder, 6, "stock")
    whole = train(cluster, shm / "whole", 6, "stock")
    assert losses(again) == {key: loss for key, loss in losses(whole).items() if key[1] > 4}, again.log
