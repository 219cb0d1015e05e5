"""What TorchTitan has of its own: its options for the disk, its config system, other numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.test_contract import ENV, run
from harness import Cluster, own_memory
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mlflash.tools.export_imports import read_dcp

pytestmark = pytest.mark.timeout(400)  # the first one waits for three launches


def of(name: str, last: int, job: str = "", /, variant: str = "fsdp2", every: int = 2, **options: Any) -> Any:
    return {"name": name, "last": last, "job": job or name, "variant": variant, "every": every, "options": options}


class Trained:
    """Trainings of two ranks, and then of one; those of one job go on from one another."""

    def __init__(self, root: Path):
        self.root = root
        separate, bare = {"exclude_from_loading": ["dataloader"]}, {"exclude_from_loading": ["dataloader", "optimizer"]}
        disk = {"interval": 1, "keep_latest_k": 2, "last_save_model_only": True, "export_dtype": "bfloat16"}
        hub = {"interval": 3, "last_save_in_hf": True, "last_save_model_only": True}
        both = {"interval": 2, "every": 1}  # memory has 3 and 4 then, the disk 2 and 4
        weights = {"initial_load_in_hf": True, "initial_load_path": str(root / "disk-weights/checkpoint/step-4")}
        off = {"enabled": False}
        two = [
            of("reference", 5) | off,
            of("plain disk", 4, "plain", variant="plain", **disk), of("disk", 4, "beside", variant="ends", **disk),
            of("plain weights", 4, "weights-plain", variant="plain", **hub), of("weights", 4, variant="ends", **hub),
            of("weights ended", 4, "weights", variant="ends", **hub),
            of("plain from weights", 2, "from-plain", **weights) | off,
            of("from weights", 2, "from", **weights), of("from weights, on", 3, "from", **weights),
            of("both", 4, "both", **both),
            *(of(f"step {step}", step + 1, "both", load_step=step, load_only=True, **both) for step in (1, 2, 3, 4)),
            of("bare from disk", 5, "both", load_step=4, load_only=True, **both, **bare),
            of("bare", 5, "both", load_only=True, **both, **bare),
            of("drawn", 5, variant="draws") | off,
            of("drawn first", 3, "drawn2", variant="draws"), of("drawn second", 5, "drawn2", variant="draws"),
            of("of two", 2, "ranks"),
        ]  # fmt: skip
        one = [
            of("refused", 3, "ranks"),
            of("of one", 2, "ranks", **separate),
            of("of one, on", 4, "ranks", **separate),
        ]
        self.two = run(Cluster(root), "torchtitan", *two)
        assert len(self.two.of("done")) == 2 * len(two), self.two.log
        self.one = run(Cluster(root, job="one"), "torchtitan", *one, ranks=1)
        assert len(self.one.of("done")) == len(one), self.one.log
        self.back = run(Cluster(root, job="back"), "torchtitan", of("of two again", 4, "ranks", **separate))
        assert len(self.back.of("done")) == 2, self.back.log

    def records(self, event: str, name: str) -> list[dict[str, Any]]:
        return [r for result in (self.two, self.one, self.back) for r in result.of(event) if r["run"] == name]

    def losses(self, name: str) -> dict[tuple[int, int], float]:
        return {(r["rank"], r["step"]): r["loss"] for r in self.records("loss", name)}

    def digests(self, name: str) -> set[str]:
        """What has become of weights and optimizer, as each rank sees it."""
        return {r["digest"] for r in self.records("end", name)}

    def restores(self, name: str) -> set[int]:
        return {r["counts"].get("restores", 0) for r in self.records("counts", name)}


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    with own_memory() as root:
        yield Trained(root)


def drawn(trained: Trained, name: str) -> dict[tuple[int, int], list[float]]:
    return {(r["rank"], r["step"]): r["drawn"] for r in trained.records("drawn", name)}


def on_disk(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for step in sorted((folder / "checkpoint").iterdir()):
        dcp_to_torch_save(step, folder / "whole.pt")
        found[step.name] = torch.load(folder / "whole.pt", weights_only=False)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_the_options_for_the_disk_do_as_without_memory(trained: Trained) -> None:
    plain, beside = on_disk(trained.root / "disk-plain"), on_disk(trained.root / "disk-beside")
    assert list(plain) == list(beside) == ["step-2", "step-3", "step-4"]  # two are kept, and the last one
    assert "optimizer" in plain["step-3"] and "optimizer" not in plain["step-4"]  # the last one is the model only
    assert plain["step-4"]["norm.weight"].dtype == torch.bfloat16
    assert same(beside, plain)
    assert [r["counts"]["committed"] for r in trained.records("counts", "disk")] == [2, 2]


def test_weights_for_hugging_face_are_written_as_without_memory_and_memory_is_gone_on_from(trained: Trained) -> None:
    plain, beside = (read_dcp(trained.root / f"disk-{job}/checkpoint/step-4") for job in ("weights-plain", "weights"))
    assert "model.norm.weight" in beside and same(beside, plain)
    assert [r["counts"]["committed"] for r in trained.records("counts", "weights")] == [2, 2]
    assert trained.restores("weights ended") == {1} and not trained.losses("weights ended")


def test_a_training_begins_with_weights_of_hugging_face_and_goes_on_from_memory(trained: Trained) -> None:
    assert trained.losses("from weights") and trained.losses("from weights") == trained.losses("plain from weights")
    first = {key: found for key, found in trained.losses("reference").items() if key[1] <= 2}
    assert trained.losses("from weights") != first, "the weights are those of the file"
    assert {step for _, step in trained.losses("from weights, on")} == {3}
    assert trained.restores("from weights, on") == {1}


@pytest.mark.parametrize(("step", "restores"), [(2, 0), (3, 1), (4, 0)])
def test_an_explicit_step_is_taken_from_disk_else_from_memory(trained: Trained, step: int, restores: int) -> None:
    name = f"step {step}"
    assert trained.restores(name) == {restores}
    expected = {key: loss for key, loss in trained.losses("reference").items() if key[1] == step + 1}
    assert trained.losses(name) == expected


def test_an_explicit_step_that_is_nowhere_is_an_error(trained: Trained) -> None:
    assert all("load_step=1 not found" in r["error"] for r in trained.records("failed", "step 1"))
    assert len(trained.records("failed", "step 1")) == 2


def test_load_only_saves_nothing(trained: Trained) -> None:
    assert all("saves" not in r["counts"] for r in trained.records("counts", "step 2"))  # it came by step 3


def test_what_is_excluded_from_loading_begins_as_it_would_without_memory(trained: Trained) -> None:
    assert trained.restores("bare") == {1} and trained.restores("bare from disk") == {0}
    losses = [trained.losses(name) for name in ("bare", "bare from disk")]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert trained.digests("bare") == trained.digests("bare from disk")


def test_random_numbers_go_on_where_the_data_loader_and_others_draw_from_them(trained: Trained) -> None:
    assert drawn(trained, "drawn first") | drawn(trained, "drawn second") == drawn(trained, "drawn")
    assert {step for _, step in drawn(trained, "drawn second")} == {3, 4, 5}
    assert trained.digests("drawn second") == trained.digests("drawn")


def test_another_number_of_ranks_goes_on_with_the_same_state(trained: Trained) -> None:
    assert trained.restores("of one") == {1} and not trained.losses("of one")
    assert trained.digests("of one") == trained.digests("of two")
    assert {step for _, step in trained.losses("of one, on")} == {3, 4}
    assert trained.restores("of two again") == {1} and not trained.losses("of two again")
    assert trained.digests("of two again") == trained.digests("of one, on")


def test_another_number_of_ranks_must_say_that_the_data_begins_anew(trained: Trained) -> None:
    (failed,) = trained.records("failed", "refused")
    assert "the data was dealt to other ranks" in failed["error"]
    assert "dp_rank_0 of 1" in failed["error"] and "dp_rank_0 of 2" in failed["error"], failed


def test_the_config_is_one_of_torchtitans_config_system_and_another_manager_is_refused(shm: Path) -> None:
    arguments = ("--checkpoint.enable", "--checkpoint.memory_interval", "3", "--checkpoint.keep_latest_k", "5",
                 "--checkpoint.memory_skip", "9")  # fmt: skip
    result = Cluster(shm).run(1, "frameworks/torchtitan_job.py", *arguments, env=ENV, timeout=120)
    (refused,), (config,), (memory,) = (result.of(event) for event in ("other manager", "config", "steps"))
    assert "CheckpointManager only" in refused["error"] and "OtherManager.Config" in refused["error"]
    assert config["kind"] == "MemoryCheckpointManager.Config"
    expected = {"memory_interval": 3, "memory_skip": 9, "keep_latest_k": 5, "interval": 1000, "async_mode": "async"}
    assert config["checkpoint"].items() >= expected.items() and memory["steps"] == [3]
