"""A recipe of NeMo's, trained by `llm.pretrain`: killed, it goes on; NeMo's own files come to disk behind training."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from harness import Cluster, Result, own_memory
from waiting import until

ENV = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(sys.path)}
pytestmark = [needs.MPI, pytest.mark.slow, pytest.mark.timeout(500)]  # the first test waits for all trainings


class Trainings:
    """Two launches: in the last training of the first all ranks are killed; the second goes on from what is there."""

    def __init__(self, root: Path):
        self.stock, self.background, self.killed = (root / name for name in ("stock", "background", "killed"))
        cluster = Cluster(root)
        self.first = self._run(
            cluster, {"run": "stock", "last": 6},
            {"run": "background", "last": 6, "every": 100, "in_background": True},
            {"run": "killed", "last": 6, "every": 1, "in_background": True, "drain_rate": 500_000, "die": 5},
        )  # fmt: skip
        until((self.killed / "small/checkpoints/step=3-last").exists, lambda: f"step=3-last:\n{self.first.log}")
        cluster.wipe(1)
        shutil.copytree(self.killed, root / "copied", symlinks=True)
        self.second = self._run(
            cluster, {"run": "stock", "last": 8, "saves": 100}, {"run": "background", "last": 8, "saves": 100},
            {"run": "copied", "last": 6, "saves": 100}, {"run": "killed", "last": 6, "every": 100, "saves": 100},
        )  # fmt: skip

    @staticmethod
    def _run(cluster: Cluster, *runs: dict[str, Any]) -> Result:
        spec = json.dumps([{"folder": str(cluster.root / run["run"]), **run} for run in runs])
        return cluster.run(2, "frameworks/nemo_recipe.py", spec, env=ENV, launcher="torchrun", timeout=300)


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    with own_memory() as root:
        yield Trainings(root)


def losses(result: Result, run: str) -> dict[tuple[int, int], float]:
    return {(one["rank"], one["step"]): one["loss"] for one in result.of("loss") if one["run"] == run}


def listing(folder: Path) -> dict[str, str]:
    """What is there, and where links go."""
    found = (folder / "small/checkpoints").iterdir()
    return {path.name: os.readlink(path) if path.is_symlink() else "" for path in found}


def content(checkpoint: Path) -> dict[str, Any]:
    """What each file says, but for the folder that it is in; of a context the files that everybody has."""
    found: dict[str, Any] = {}
    for path in checkpoint.rglob("*"):
        if path.parent.name == "weights" and path.name not in ("common.pt", ".metadata"):
            found[path.name] = path.read_bytes()
    found["common"] = repr(torch.load(checkpoint / "weights/common.pt", weights_only=False))
    found["common"] = found["common"].replace(str(checkpoint.parents[2]), "FOLDER")
    assert {"io.json", "model.yaml"} <= set(os.listdir(checkpoint / "context"))
    return found


def test_a_killed_recipe_goes_on_from_memory_with_the_same_bits(trainings: Trainings) -> None:
    whole, gone_on = losses(trainings.first, "stock"), losses(trainings.second, "killed")
    assert len(whole) == 12 and {step for _, step in losses(trainings.first, "killed")} == {1, 2, 3, 4, 5}
    assert min(gone_on)[1] in (5, 6), trainings.second.log  # the last save may not have been committed
    assert gone_on == {key: loss for key, loss in whole.items() if key[1] >= min(gone_on)[1]}


def test_nemo_finds_the_files_that_it_would_have_written(trainings: Trainings) -> None:
    assert losses(trainings.first, "background") == losses(trainings.first, "stock"), trainings.first.log
    assert (
        listing(trainings.background)
        == listing(trainings.stock)
        == {"step=3": "", "step=5": "", "step=5-last": "step=5"}
    )
    for name in ("step=3", "step=5"):
        ours, theirs = (content(one / "small/checkpoints" / name) for one in (trainings.background, trainings.stock))
        assert ours == theirs and len(ours) >= 6
    gone_on = losses(trainings.second, "background")
    assert gone_on == losses(trainings.second, "stock") and {step for _, step in gone_on} == {7, 8}, (
        trainings.second.log
    )


def test_nemo_alone_goes_on_from_what_came_to_disk_though_all_were_killed(trainings: Trainings) -> None:
    last = [one for one in trainings.first.of("step") if one["run"] == "killed" and one["step"] == 4]
    assert len(last) == 2 and all("step=3" not in one["there"] for one in last), "it was still in memory"
    assert listing(trainings.killed) == {"step=1": "", "step=1-last": "step=1", "step=3": "", "step=3-last": "step=3"}
    ours, theirs = (content(one / "small/checkpoints/step=3") for one in (trainings.killed, trainings.stock))
    assert ours == theirs
    assert {step for _, step in losses(trainings.second, "copied")} == {5, 6}, trainings.second.log
    done = {(one["run"], one["mlflash"]) for one in trainings.second.of("done")}
    assert done == {("stock", False), ("background", False), ("copied", False), ("killed", True)}
