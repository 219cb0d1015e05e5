"""Lightning's own checkpoints, moved to their place behind training: the same files, and stock Lightning resumes."""

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
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from waiting import until

ENV = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(sys.path)}
pytestmark = [needs.MPI, pytest.mark.slow, pytest.mark.timeout(300)]  # most of it imports


def train(cluster: Cluster, folder: Path, last: int, how: str, **more: Any) -> Result:
    folder.mkdir(exist_ok=True)
    spec = json.dumps({"folder": str(folder), "last": last, "how": how, **more})
    return cluster.run(2, "frameworks/lightning_files_job.py", spec, env=ENV, launcher="torchrun", timeout=120)


def losses(result: Result) -> dict[tuple[int, int], float]:
    return {(one["rank"], one["step"]): one["loss"] for one in result.of("loss")}


def content(path: Path) -> str:
    """All that a checkpoint says, but for the folder that it is in, and what differs from run to run."""
    found: dict[str, Any] = {}
    if path.is_dir():
        _load_state_dict(found, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    meta = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)
    meta.pop("MLFlashCallback", None)
    meta["callbacks"] = {name: state for name, state in meta["callbacks"].items() if "ModelCheckpoint" in name}
    return repr((found, meta)).replace(str(path.parent), "FOLDER")


def listing(folder: Path) -> dict[str, str]:
    """What is there, and where links go."""
    return {path.name: os.readlink(path) if path.is_symlink() else "" for path in folder.iterdir()}


KEEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "the newest two, and a link": ("ddp", {"save_top_k": 2, "monitor": "metric", "mode": "min", "save_last": "link"}),
    "one, and a copy": ("ddp", {"save_top_k": 1, "monitor": "metric", "mode": "min", "save_last": True}),
    "sharded": ("fsdp2", {"save_top_k": 2, "monitor": "metric", "mode": "min"}),
}


@pytest.mark.parametrize("case", KEEPS)
def test_lightning_finds_the_files_that_it_would_have_written(shm: Path, case: str) -> None:
    cluster, (kind, keep) = Cluster(shm), KEEPS[case]
    stock, background = (train(cluster, shm / how, 7, how, kind=kind, keep=keep) for how in ("stock", "background"))
    assert losses(stock) == losses(background) and len(losses(stock)) == 14, background.log
    ends = [[(end["best"], end["last"]) for end in one.of("end")] for one in (stock, background)]
    assert ends[0] == ends[1] and len(ends[0]) == 1
    assert listing(shm / "background") == listing(shm / "stock"), background.log
    for name in listing(shm / "stock"):
        assert content(shm / "background" / name) == content(shm / "stock" / name), name


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
