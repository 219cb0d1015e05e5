"""What is special to NeMo: how a trainer is wrapped, which checkpoint AutoResume takes, other strategies and ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from frameworks.test_contract import UID, digests, losses, order, run, steps
from harness import Cluster, Result


def slots_of(shm: Path, job: str) -> list[Path]:
    return list(shm.glob(f"node*/mlflash-{UID}/{job}/slot-*"))


def refused(result: Result, name: str) -> set[str]:
    return {record["error"] for record in result.of("refused") if record["run"] == name}


@pytest.mark.parametrize("variant", ["tensor", "fsdp2"])
def test_other_strategies_go_on_with_the_same_bits(shm: Path, variant: str) -> None:
    common = {"variant": variant, "job": "other"}
    result = run(
        Cluster(shm), "nemo",
        {"name": "reference", "last": 7, "variant": variant, "enabled": False},
        {"name": "first", "last": 5, **common},
        {"name": "second", "last": 7, **common},
        {"name": "deleted", "last": 4, "job": "deleted", "variant": f"{variant} delete, sync"},
    )  # fmt: skip
    assert steps(result, "first") == [1, 2, 3, 4, 5] and steps(result, "second") == [5, 6, 7], result.log
    assert losses(result, "reference") == losses(result, "first") | losses(result, "second"), result.log
    assert digests(result, "second") == digests(result, "reference") != []
    assert slots_of(shm, "other") and not slots_of(shm, "deleted")
    assert steps(result, "deleted") == [1, 2, 3, 4]


def test_saves_to_disk_may_be_asynchronous_and_those_to_memory_not(shm: Path) -> None:
    result = run(
        Cluster(shm), "nemo",
        {"name": "first", "last": 5, "disk": 2, "every": 1, "skip": 2, "variant": "async", "job": "async"},
        {"name": "second", "last": 6, "disk": 2, "every": 1, "skip": 2, "variant": "sync", "job": "async"},
        {"name": "third", "last": 7, "disk": 2, "every": 1, "skip": 2, "variant": "async", "job": "async"},
        {"name": "tie", "last": 4, "disk": 2, "job": "tie"},
        {"name": "after tie", "last": 5, "disk": 2, "job": "tie"},
        {"name": "waits", "last": 4, "every": 1, "variant": "sync, slow commits", "job": "waits"},
        {"name": "goes along", "last": 4, "every": 1, "variant": "slow commits", "job": "along"},
    )  # fmt: skip
    assert len(result.of("done")) == 7 * 2, result.log
    for rank in range(2):
        assert order(result, "waits", rank) == "lc" * 4 and order(result, "goes along", rank).startswith("ll"), (
            result.log
        )
    assert [steps(result, name) for name in ("first", "second", "third")] == [[1, 2, 3, 4, 5], [6], [7]], result.log
    assert steps(result, "after tie") == [5]
    path = r"\S*disk-tie-flash1/step-00000004"
    assert re.search(f"Restored all states from the checkpoint at {path}", result.log), result.log
    # NeMo counts steps from 0 here.
    assert {"step=1", "step=3", "step=5"} <= {path.name for path in (shm / "disk-async" / "checkpoints").iterdir()}


def test_memory_is_kept_or_removed_at_the_end_as_asked_and_mistakes_are_told(shm: Path) -> None:
    cluster = Cluster(shm)
    result = run(
        cluster, "nemo",
        {"name": "kept", "last": 4, "job": "kept"},
        {"name": "deleted", "last": 4, "job": "deleted", "variant": "delete"},
        {"name": "nothing", "last": 4, "job": "nothing", "variant": "must resume"},
        {"name": "goes on", "last": 5, "job": "kept", "variant": "must resume"},
        {"name": "context", "last": 4, "job": "context", "variant": "context"},
        {"name": "from context", "last": 5, "job": "context", "variant": "context"},
        {"name": "by hand", "last": 4, "job": "by-hand", "variant": "by hand", "every": 100},
        {"name": "after hand", "last": 5, "job": "by-hand", "every": 100},
        {"name": "not wrapped", "last": 4, "job": "mistake", "variant": "not wrapped"},
        {"name": "no callback", "last": 4, "job": "mistake", "variant": "no callback"},
        {"name": "other io", "last": 4, "job": "mistake", "variant": "other io"},
        {"name": "no context", "last": 4, "job": "mistake", "variant": "context with what is open"},
        {"name": "two writers", "last": 4, "job": "mistake", "variant": "async", "settings": {"in_background": True}},
        {"name": "other files", "last": 4, "job": "mistake", "variant": "fsdp2", "settings": {"in_background": True}},
        {"name": "after it", "last": 4, "job": "mistake"},
    )  # fmt: skip
    assert len(result.of("done")) == 15 * 2, result.log
    assert steps(result, "kept") == steps(result, "deleted") == [1, 2, 3, 4]
    assert slots_of(shm, "kept") and steps(result, "goes on") == [5]
    assert not slots_of(shm, "deleted")
    contexts: dict[str, Any] = {record["run"]: record for record in result.of("context")}
    assert contexts["context"]["files"] is None
    assert {"io.json", "model.yaml"} <= set(contexts["from context"]["files"]) and contexts["from context"][
        "hidden"
    ] == 64
    assert steps(result, "from context") == [5]
    assert steps(result, "after hand") == [4, 5] and (shm / "disk-by-hand-flash10" / "step-3").is_dir()
    assert not (shm / "disk-by-hand-flash1").exists()
    (nothing,) = refused(result, "nothing")
    assert nothing.startswith("NotFoundError"), nothing
    (not_wrapped,) = refused(result, "not wrapped")
    assert "has to come before fit" in not_wrapped
    (no_callback,) = refused(result, "no callback")
    assert "append an MLFlashCheckpointCallback" in no_callback
    assert steps(result, "after it") == [1, 2, 3, 4] and refused(result, "after it") == set()
    (other_io,) = refused(result, "other io")
    assert "the strategy has another CheckpointIO" in other_io and "MegatronCheckpointIO" in other_io
    (two_writers,), (other_files,) = refused(result, "two writers"), refused(result, "other files")
    assert "ckpt_async_save=False" in two_writers and "is for checkpoints of a MegatronStrategy" in other_files
    no_context = refused(result, "no context")
    assert len(no_context) == 2 and all("cannot pickle" in why for why in no_context), no_context


def test_a_wrap_that_is_off_leaves_the_trainer_to_nemo(shm: Path) -> None:
    common = {"disk": 2, "every": 1, "variant": "wrap off", "job": "wrapped-off"}
    result = run(
        Cluster(shm), "nemo",
        {"name": "reference", "last": 5, "enabled": False},
        {"name": "first", "last": 5, **common},
        {"name": "second", "last": 7, **common},
    )  # fmt: skip
    assert len(result.of("done")) == 3 * 2 and refused(result, "first") == set(), result.log
    assert losses(result, "first") == losses(result, "reference") and steps(result, "second") == [5, 6, 7], result.log
    assert not list(shm.glob(f"node*/mlflash-{UID}"))
    assert result.log.count("mlflash is off (enabled=False)") == 1, result.log


def test_other_ranks_go_on_where_megatron_can_reshard_the_optimizer_and_are_told_where_not(shm: Path) -> None:
    cluster = Cluster(shm)
    replicas = {"name": "replicas", "job": "replicas"}
    whole = {"name": "whole", "job": "whole", "variant": "tensor, reshardable"}
    parts = {"name": "parts", "job": "parts", "variant": "tensor"}
    both = run(cluster, "nemo", {"last": 4, **replicas})  # NeMo keeps its groups: others need other processes
    saved = run(cluster, "nemo", {"last": 4, **whole}, {"last": 4, **parts})
    result = run(
        cluster, "nemo",
        {"last": 4, **replicas},
        {"last": 6, **replicas, "name": "fewer"},
        {"last": 6, **whole, "variant": "reshardable"},
        {"last": 6, "name": "parts", "job": "parts"},
        ranks=1,
    )  # fmt: skip
    assert steps(saved, "whole") == steps(saved, "parts") == [1, 2, 3, 4], saved.log
    assert set(digests(both, "weights of replicas")) == set(digests(result, "weights of replicas")) != set()
    assert steps(result, "fewer") == steps(result, "whole") == [5, 6], result.log
    assert "was saved by 2 ranks, not by as many as now: random numbers begin anew" in result.log
    assert steps(result, "parts") == []
    (error,) = refused(result, "parts")
    assert "RuntimeError" in error and "ckpt_optim_fully_reshardable" in error, error


def test_a_torn_checkpoint_on_disk_stops_no_start(shm: Path) -> None:
    disk, memory = {"disk": 2, "every": 100, "job": "disk"}, {"disk": 2, "job": "memory"}
    result = run(
        Cluster(shm), "nemo",
        {"name": "to disk", "last": 5, **disk},
        {"name": "one before", "last": 6, "torn": "step=3/weights/common.pt", **disk},
        {"name": "to memory", "last": 4, **memory},
        {"name": "from memory", "last": 5, "torn": "common.pt", "torn_to": 0.0, **memory},
    )  # fmt: skip
    assert len(result.of("done")) == 4 * 2 and not result.of("refused"), result.log
    assert steps(result, "one before") == [3, 4, 5, 6] and steps(result, "from memory") == [5], result.log
    assert "cannot be read, so mlflash looks for another checkpoint" in result.log
