"""What is special to Lightning: other numbers of ranks, signals, paths of checkpoints in memory, `fit` called twice.

Its own checkpoints may be moved to their place behind training: the same files, from which stock Lightning resumes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.test_contract import digests, losses, order, run, steps
from harness import Cluster
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from waiting import until


@pytest.mark.parametrize(("variant", "before", "after"), [("ddp", 2, 1), ("fsdp2", 1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_bits(shm: Path, variant: str, before: int, after: int) -> None:
    cluster, common = Cluster(shm), {"variant": variant}
    saved = run(cluster, "lightning", {"name": "saved", "last": 4, **common}, ranks=before)
    runs = [{"name": "loaded", "last": 4, **common}, {"name": "goes on", "last": 6, **common}]
    result = run(cluster, "lightning", *runs, ranks=after)
    assert not losses(result, "loaded"), result.log  # all four steps are done
    assert set(digests(result, "loaded")) == set(digests(saved, "saved")) != set()
    assert steps(result, "goes on") == [5, 6], result.log


def test_paths_signals_a_second_fit_and_saves_that_wait(shm: Path) -> None:
    common, slow = {"job": "paths", "last": 5}, {"variant": "slow commits", "every": 1}
    result = run(
        Cluster(shm), "lightning",
        {"name": "saves", **common},
        {"name": "older", "variant": "mlflash:2", **common},
        {"name": "stopped", "variant": "signal", "job": "signal", "last": 9, "every": 100},
        {"name": "after signal", "job": "signal", "last": 4},
        {"name": "one more", "variant": "twice", "job": "twice", "last": 4},
        {"name": "tie", "disk": 2, "job": "tie", "last": 4},
        {"name": "after tie", "disk": 2, "job": "tie", "last": 5},
        {"name": "half an epoch", "job": "epoch", "last": 2},
        {"name": "an epoch", "job": "epoch", "last": 4},
        {"name": "to be validated", "job": "validated", "last": 4},
        {"name": "validated", "variant": "only validate", "job": "validated", "last": 4},
        {"name": "waits", "job": "waits", "last": 5, "settings": {"async_save": False}, **slow},
        {"name": "goes along", "job": "along", "last": 5, **slow},
    )  # fmt: skip
    assert len(result.of("done")) == 13 * 2, result.log
    first = {name: steps(result, name) for name in ("older", "stopped", "after signal", "one more")}
    assert first == {"older": [3, 4, 5], "stopped": [1, 2, 3], "after signal": [4], "one more": [1, 2, 3, 4, 5]}
    assert digests(result, "older") == digests(result, "saves")
    assert digests(result, "after tie") == digests(result, "saves")  # from memory, which has random numbers
    assert digests(result, "an epoch") == digests(result, "tie")  # it knows its last batch
    assert digests(result, "validated") == digests(result, "to be validated")
    for rank in range(2):
        assert order(result, "waits", rank) == "lc" * 5 and order(result, "goes along", rank).startswith("ll"), (
            result.log
        )
    assert "a signal has come: training stops after step 3" in result.log


def test_a_torn_checkpoint_on_disk_stops_no_start(shm: Path) -> None:
    """Memory is taken, or one beside it, whatever is the newest that can be read."""
    disk, memory = {"disk": 2, "every": 100, "job": "disk"}, {"disk": 2, "job": "memory"}
    older = {"disk": 3, "every": 2, "job": "older"}
    result = run(
        Cluster(shm), "lightning",
        {"name": "to disk", "last": 5, **disk},
        {"name": "one before", "last": 6, "torn": "last.ckpt", **disk},
        {"name": "to memory", "last": 4, **memory},
        {"name": "from memory", "last": 5, "torn": "*.ckpt", "torn_to": 0.0, **memory},
        {"name": "to both", "last": 3, **older},
        {"name": "from disk", "last": 4, "torn": "last.ckpt", "torn_to": 0.0, **older},
    )  # fmt: skip
    assert len(result.of("done")) == 6 * 2, result.log
    first = {name: steps(result, name) for name in ("one before", "from memory", "from disk")}
    assert first == {"one before": [5, 6], "from memory": [5], "from disk": [4]}, result.log
    assert "disk-disk/last.ckpt cannot be read, so mlflash looks for another checkpoint" in result.log


def test_what_callbacks_change_is_copied_before_or_the_save_fails_and_later_ones_copy_at_once(shm: Path) -> None:
    """Lightning's own change weights where an epoch begins, and where training ends."""
    late = {"every": 1, "late": True}
    epoch, batch = {"variant": "changes on_train_epoch_start"}, {"variant": "changes on_train_batch_start"}
    result = run(
        Cluster(shm), "lightning",
        {"name": "plain", "job": "plain", "last": 4},
        {"name": "end", "job": "end", "last": 4, "variant": "changes on_train_end", **late},
        {"name": "after end", "job": "end", "last": 4},
        {"name": "epoch", "job": "epoch", "last": 5, **epoch, **late},
        {"name": "after epoch", "job": "epoch", "last": 6, "damaged": 5, **epoch},
        {"name": "no epoch", "job": "none", "enabled": False, "last": 6, **epoch},
        {"name": "batch", "job": "batch", "last": 4, **batch, **late},
        {"name": "after batch", "job": "batch", "last": 6, **batch},
        {"name": "no batch", "job": "none", "enabled": False, "last": 6, **batch},
    )  # fmt: skip
    assert len(result.of("done")) == 9 * 2, result.log
    assert digests(result, "after end") == digests(result, "plain") != digests(result, "end")
    for name in ("epoch", "batch"):  # from step 4, which is an epoch's last
        assert steps(result, f"after {name}") == [5, 6], result.log
        assert digests(result, f"after {name}") == digests(result, f"no {name}")
    eager = [record["run"] for record in result.of("said") if "than an optimizer's step changed" in record["text"]]
    assert eager == ["batch"]


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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("trigger", "variant"), [("best two, linked", "ddp"), ("best one, copied", "ddp"), ("best two", "fsdp2")]
)
def test_lightning_finds_the_files_that_it_would_have_written(shm: Path, trigger: str, variant: str) -> None:
    common = {"last": 7, "every": 100, "trigger": trigger, "variant": variant}
    result = run(
        Cluster(shm), "lightning",
        {"name": "stock", "job": "stock", "enabled": False, **common},
        {"name": "background", "job": "background", "settings": {"in_background": True}, **common},
    )  # fmt: skip
    assert losses(result, "stock") == losses(result, "background") and len(losses(result, "stock")) == 14, result.log
    stock, background = shm / "disk-stock", shm / "disk-background"
    assert listing(background) == listing(stock), result.log
    for name in listing(stock):
        assert content(background / name) == content(stock / name), name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", ["ddp", "fsdp2"])
def test_lightning_resumes_from_what_came_to_its_place_though_all_were_killed(shm: Path, variant: str) -> None:
    cluster, folder, name = Cluster(shm), shm / "disk-run", "epoch=0-step=4.ckpt"
    common = {"last": 6, "every": 100, "trigger": "best two, linked", "variant": variant}
    slow = {"in_background": True, "drain_rate": 100_000.0}
    killed = run(
        cluster, "lightning", {"name": "whole", "job": "whole", "enabled": False, **common},
        {"name": "run", "job": "run", "dies_at": 5, "settings": slow, **common},
        launcher="torchrun",  # mpiexec would also kill what moves the files
    )  # fmt: skip
    held = killed.of("held")
    assert len(held) == 2 and all(name not in one["there"] for one in held), "it was still in memory"
    until(lambda: listing(folder).get("last.ckpt") == name, lambda: f"a link to {name} in {listing(folder)}")
    assert content(folder / name) == content(shm / "disk-whole" / name), killed.log
    again = run(cluster, "lightning", {"name": "run", "job": "run", "enabled": False, **common})
    assert steps(again, "run") == [5, 6], again.log
