"""What the adapter to Hugging Face's Trainer keeps besides the contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.test_contract import Losses, digests, losses
from frameworks.test_contract import run as run_contract
from harness import Cluster, Result, own_memory
from waiting import until

pytestmark = pytest.mark.timeout(300)  # the first test waits for all trainings

LAST = 7
TIMES = {"train_runtime", "eval_runtime", "train_samples_per_second", "eval_samples_per_second",
         "train_steps_per_second", "eval_steps_per_second", "train_loss", "total_flos"}  # fmt: skip


def run(cluster: Cluster, ranks: int, *runs: dict[str, Any]) -> Result:
    result = run_contract(cluster, "transformers", *runs, ranks=ranks, launcher="mpiexec")
    assert len(result.of("done")) == len(runs) * ranks, result.log
    return result


def twice(variant: str, first: int, **more: Any) -> list[dict[str, Any]]:
    """A training that is not interrupted; and one that is begun, and goes on."""
    job, same = variant.replace(" ", "-"), {"variant": variant, **more}
    return [
        {"name": f"{variant}, at once", "job": f"{job}-0", "last": LAST, "enabled": False, **same},
        {"name": f"{variant}, begun", "job": f"{job}-1", "last": first, **same},
        {"name": f"{variant}, gone on", "job": f"{job}-1", "last": LAST, **same},
    ]


def assert_goes_on(result: Result, variant: str, first: int) -> None:
    """Assert that the second part took the steps from the first on, with the same bits."""
    at_once = losses(result, f"{variant}, at once")
    found = losses(result, f"{variant}, gone on")
    assert found == {key: loss for key, loss in at_once.items() if key[1] >= first}, result.log
    assert digests(result, f"{variant}, gone on") == digests(result, f"{variant}, at once")


def of(result: Result, event: str, name: str) -> list[dict[str, Any]]:
    return [record for record in result.of(event) if record["run"] == name]


@pytest.fixture(scope="module")
def result() -> Iterator[Result]:
    path, afresh = {"job": "path"}, {"job": "afresh"}
    alike, apart = {"job": "alike"}, {"job": "apart", "settings": {"replicated": None}}
    late, best = {"every": 1, "late": True}, {"job": "best", "variant": "best", "trigger": "best at end"}
    epoch, batch = {"variant": "changes on_epoch_begin"}, {"variant": "changes on_step_begin"}
    with own_memory() as root:
        yield run(
            Cluster(root), 2,
            {"name": "reference", "job": "reference", "last": LAST, "enabled": False},
            *twice("history steps", 4), *twice("history epoch", 4),
            {"name": "path, begun", "last": 5, "disk": 3, **path},
            {"name": "path, gone on", "last": LAST, "variant": "path", "disk": 9, **path},
            {"name": "afresh, long", "last": 6, **afresh},
            {"name": "afresh, again", "last": 3, "variant": "afresh", **afresh},
            {"name": "afresh, gone on", "last": LAST, **afresh},
            {"name": "wrapped, begun", "job": "wrapped", "variant": "wrapped", "last": 5},
            {"name": "wrapped, gone on", "job": "wrapped", "variant": "wrapped", "last": LAST},
            {"name": "alike, begun", "last": 4, "variant": "slots", **alike},
            {"name": "alike, gone on", "last": LAST, **alike},
            {"name": "apart, begun", "last": 4, "variant": "slots", **apart},
            {"name": "apart, gone on", "last": LAST, **apart},
            {"name": "refused", "last": LAST, "job": "refused", "variant": "refused"},
            {"name": "best", "last": 4, "late": True, "follows": True, **best},
            {"name": "after best", "last": LAST, "follows": True, **best},
            {"name": "end", "job": "end", "last": 4, "variant": "changes on_train_end", **late},
            {"name": "after end", "job": "end", "last": LAST},
            {"name": "epoch", "job": "epoch", "last": 5, **epoch, **late},
            {"name": "after epoch", "job": "epoch", "last": LAST, "damaged": 5, **epoch},
            {"name": "no epoch", "job": "none", "enabled": False, "last": LAST, **epoch},
            {"name": "batch", "job": "batch", "last": 4, **batch, **late},
            {"name": "after batch", "job": "batch", "last": LAST, **batch},
            {"name": "no batch", "job": "none", "enabled": False, "last": LAST, **batch},
        )  # fmt: skip


def reference(result: Result, first: int) -> Losses:
    return {key: loss for key, loss in losses(result, "reference").items() if key[1] >= first}


@pytest.mark.parametrize("by", ["steps", "epoch"])
def test_the_state_of_trainer_and_callbacks_comes_back(result: Result, by: str) -> None:
    assert_goes_on(result, f"history {by}", 5)

    def state(part: str) -> list[dict[str, Any]]:
        states = [{**record["state"], "stateful_callbacks": record["callbacks"]}
                  for record in of(result, "state", f"history {by}, {part}")]  # fmt: skip
        for one in states:
            one["log_history"] = [{k: v for k, v in log.items() if k not in TIMES} for log in one["log_history"]]
        return states

    found, expected = state("gone on"), state("at once")
    assert found == expected
    assert found[0]["best_metric"] is not None
    assert found[0]["stateful_callbacks"]["Counts"]["attributes"] == {"steps": LAST}
    assert [log["step"] for log in found[0]["log_history"] if "loss" in log] == ([3, 6] if by == "steps" else [4, 7])
    assert [log["step"] for log in found[0]["log_history"] if "eval_loss" in log] == (
        [2, 4, 6] if by == "steps" else [4, 7])  # fmt: skip


def test_a_path_that_is_given_is_taken_whatever_memory_has(result: Result) -> None:
    assert losses(result, "path, gone on") == reference(result, 4)
    assert digests(result, "path, gone on") == digests(result, "reference")


def test_a_training_begun_afresh_is_the_newest(result: Result) -> None:
    assert min(step for _, step in losses(result, "afresh, again")) == 1
    assert losses(result, "afresh, gone on") == reference(result, 3)


def test_the_wrapper_saves_every_save_mem_interval_and_can_be_taken_off(result: Result) -> None:
    assert losses(result, "wrapped, gone on") == reference(result, 4)
    for record in result.of("removed"):
        assert "No valid checkpoint found" in record["failed"] and record["left"] == ["train"]


def test_what_ranks_of_ddp_hold_alike_is_stored_once_unless_the_settings_say_otherwise(result: Result) -> None:
    alike = [record["slots"] for record in of(result, "slots", "alike, begun")]
    apart = [record["slots"] for record in of(result, "slots", "apart, begun")]
    assert len(alike) == len(apart) == 2
    for one, other in zip(alike, apart, strict=True):
        assert "share" in one and "share" not in other
        assert one["own"] < 0.5 * other["own"] and one["of others"] < 0.5 * other["of others"]
    assert losses(result, "alike, gone on") == losses(result, "apart, gone on") == reference(result, 5)
    assert "differ" not in result.log


def test_what_is_not_known_is_refused(result: Result) -> None:
    expected = ["does not know it", "FSDP1", "when it is made", "already"]
    for rank in (0, 1):
        found = [record["why"] for record in result.of("refused") if record["rank"] == rank]
        assert len(found) == len(expected)
        assert all(part in why for part, why in zip(expected, found, strict=True)), found


def test_another_number_of_ranks_goes_on(shm: Path) -> None:
    cluster = Cluster(shm)

    def train(ranks: int, *lasts: int) -> Result:
        runs = [{"name": f"{variant}, {last}", "job": variant, "variant": variant, "trigger": "ends", "last": last}
                for variant in ("ddp", "fsdp2") for last in lasts]  # fmt: skip
        return run(cluster, ranks, *runs)

    two, one, again = train(2, 6), train(1, 6, 8), train(2, 8, 10)
    for variant in ("ddp", "fsdp2"):
        for before, after, last in ((two, one, 6), (one, again, 8)):
            assert not losses(after, f"{variant}, {last}"), after.log  # all of these steps are done
            found, expected = (set(digests(result, f"{variant}, {last}")) for result in (after, before))
            assert found == expected and len(found) == 1
            assert {step for _, step in losses(after, f"{variant}, {last + 2}")} == {last + 1, last + 2}


def test_what_callbacks_and_the_trainer_change_is_copied_before_or_later_saves_copy_at_once(result: Result) -> None:
    for name in ("best", "end", "epoch", "batch"):
        assert {step for _, step in losses(result, f"after {name}")} == {5, 6, LAST}, (name, result.log)
    assert digests(result, "after end") == digests(result, "reference") != digests(result, "end")
    for name in ("epoch", "batch"):
        assert digests(result, f"after {name}") == digests(result, f"no {name}")
    said = [record["run"] for record in result.of("said") if "than an optimizer's step changed" in record["text"]]
    assert said == ["batch"]


@pytest.mark.parametrize("torn", [(4,), (2, 4)], ids=["newest", "all"])
def test_a_checkpoint_that_the_trainer_did_not_finish_is_passed_over(shm: Path, torn: tuple[int, ...]) -> None:
    cluster, common = Cluster(shm), {"job": "own", "last": 4, "every": 100, "trigger": "steps", "variant": "ddp"}
    written = run(cluster, 1, {"name": "own", "enabled": False, **common})
    states = [shm / "disk-own" / f"checkpoint-{step}" / "trainer_state.json" for step in torn]
    os.truncate(states[0], states[0].stat().st_size // 2)  # killed while it was written
    for state in states[1:]:
        state.unlink()  # or before
    again = run(cluster, 1, {"name": "own", **common})
    first = 3 if torn == (4,) else 1
    assert losses(again, "own") == {key: loss for key, loss in losses(written, "own").items() if key[1] >= first}
    assert digests(again, "own") == digests(written, "own")
    said = "\n".join(record["text"] for record in again.of("said"))
    assert all(f"training does not start from {state.parent}, which" in said for state in states), said


# The Trainer's own checkpoints, moved to disk behind training


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


@pytest.mark.slow
def test_transformers_finds_the_files_that_it_would_have_written(shm: Path) -> None:
    ways: dict[str, dict[str, Any]] = {"stock": {"enabled": False}, "background": {"settings": {"in_background": True}}}
    runs = [{"name": f"{how} {trigger}", "job": f"{how}-{trigger.split()[-1]}", "trigger": trigger, "variant": "ddp",
             "kept": 2, "last": 6, "every": 100, **more}
            for how, more in ways.items() for trigger in ("best at end", "best of epochs")]  # fmt: skip
    cluster = Cluster(shm)
    result = run_contract(cluster, "transformers", *runs)
    assert len(result.of("done")) == len(runs) * 2, result.log
    for trigger in ("best at end", "best of epochs"):
        assert losses(result, f"stock {trigger}") == losses(result, f"background {trigger}") != {}, result.log
        theirs, ours = (sorted((shm / f"disk-{how}-{trigger.split()[-1]}").glob("*")) for how in ways)
        assert [path.name for path in ours] == [path.name for path in theirs] and len(theirs) == 2, result.log
        for one, other in zip(theirs, ours, strict=True):
            expected, found = checkpoint(one), checkpoint(other)
            assert set(found) == set(expected) and len(found) >= 8
            for file in expected:
                assert found[file] == expected[file], file
    said = json.loads((shm / "disk-background-epochs/checkpoint-6/trainer_state.json").read_text())
    assert said["best_model_checkpoint"] == str(shm / "disk-background-epochs/checkpoint-4")
    again = run_contract(cluster, "transformers", *({**one, "enabled": False, "last": 8} for one in runs[::2]))
    stock, background = (losses(again, f"{how} best at end") for how in ways)
    assert stock == background and {step for _, step in stock} == {7, 8}, again.log


@pytest.mark.slow
def test_transformers_checkpoint_comes_to_disk_though_all_are_killed_right_after_its_save(shm: Path) -> None:
    cluster, written = Cluster(shm), shm / "disk-run" / "checkpoint-4"
    slow = {"in_background": True, "drain_rate": 60_000.0}
    common = {"last": 6, "every": 100, "trigger": "steps", "variant": "ddp"}
    whole = {"name": "whole", "job": "whole", "enabled": False, **common}
    killed = run_contract(
        cluster, "transformers", whole, {"name": "run", "job": "run", "dies_at": 5, "settings": slow, **common},
        launcher="torchrun",  # mpiexec would also kill what moves the files
    )  # fmt: skip
    held = killed.of("held")
    assert len(held) == 2 and all(written.name not in one["there"] for one in held), "it was still in memory"
    until(written.is_dir, lambda: f"checkpoint-4 in {sorted(written.parent.iterdir())}")
    again = run_contract(cluster, "transformers", {"name": "run", "job": "run", "enabled": False, **common})
    assert losses(again, "run") == {key: loss for key, loss in losses(killed, "whole").items() if key[1] > 4}, again.log


def test_it_needs_no_deepspeed() -> None:
    program = "import sys; sys.modules['deepspeed'] = None; import mlflash.adapters.transformers"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=100)
