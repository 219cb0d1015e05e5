"""What is special to DeepSpeed: tags, storage beside memory, parts of a checkpoint, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import UID, Cluster, Result, own_memory

RANKS = 2
ENV = {"PYTHONWARNINGS": "ignore"}
OF_A_STAGE = ["tags", "weights_only", "storage", "in_background"]
ONCE = ["failed", "closed", "refused", "other_stage", "in_a_state", "tensor_parallel"]


def run_all(cluster: Cluster, cases: Sequence[tuple[str, str]], ranks: int = RANKS) -> Result:
    result = cluster.run(ranks, "frameworks/deepspeed_cases.py", json.dumps(cases), env=ENV, timeout=120)
    assert len(result.of("done")) == len(cases) * ranks, result.log
    return result


def launched(stage: str, *cases: str) -> Iterator[Result]:
    with own_memory() as root:
        yield run_all(Cluster(root), [(stage, case) for case in cases])


@pytest.fixture(scope="module", params=["zero0", "zero1", "fp16", "zero3", "bf16"])
def staged(request: pytest.FixtureRequest) -> Iterator[Result]:
    yield from launched(request.param, *OF_A_STAGE)


@pytest.fixture(scope="module")
def once() -> Iterator[Result]:
    yield from launched("zero1", *ONCE)


def each(result: Result, event: str, *names: str) -> list[tuple[Any, ...]]:
    """What all ranks have noted of an event, alike."""
    by_rank = [
        [tuple(one[name] for name in names) for one in result.of(event) if one["rank"] == r] for r in range(RANKS)
    ]
    assert by_rank[0] == by_rank[1], result.log
    return by_rank[0]


def test_a_tag_names_a_checkpoint_in_memory(staged: Result) -> None:
    assert each(staged, "loaded", "tag", "step", "path") == [
        ("first", 1, "step 1 of mlflash"),
        ("second", 2, "step 2 of mlflash"),
        (None, 2, "step 2 of mlflash"),
    ]
    assert all(record["same"] for record in staged.of("loaded")), staged.log
    assert each(staged, "listed", "steps") == [([1, 2],)]


def test_a_tag_that_is_nowhere_is_not_replaced_by_another(staged: Result) -> None:
    assert each(staged, "unknown", "text") == [("",)]  # DeepSpeed asserts that there are files


def test_each_rank_gets_its_own_client_state(staged: Result) -> None:
    assert all(record["rank_said"] == record["rank"] for record in staged.of("loaded"))
    assert {record["args"] for record in staged.of("loaded")} == {"Namespace(lr=0.1)"}


def test_checkpoints_in_memory_leave_nothing_where_those_on_disk_are(staged: Result) -> None:
    assert each(staged, "nothing written", "there") == [(False,)]


def test_without_optimizer_state_or_schedule_memory_gives_what_disk_gives(staged: Result) -> None:
    for rank in range(RANKS):
        found: dict[str, list[Any]] = {}
        for record in staged.of("weights"):
            if record["rank"] == rank:
                found.setdefault(record["way"], []).append(record["of"])
        assert len(found) >= 2 and all(disk == memory for disk, memory in found.values()), staged.log


def test_with_zero_3_a_load_that_would_load_no_weights_is_refused(staged: Result) -> None:
    ((stage, text),) = each(staged, "module only", "stage", "text")
    assert ("loads no weights: use load_optimizer_states=False [rank 0" in text) == (stage == "zero3"), text
    assert "undefined" not in text, "it is refused before anything is loaded"


def test_deepspeed_alone_goes_on_from_storage_with_the_same_bits(staged: Result) -> None:
    assert each(staged, "plain", "step", "same", "seen") == [(4, True, 4), (5, True, 5)]


def test_deepspeed_finds_the_files_that_it_would_have_written(staged: Result) -> None:
    ((files, *found),) = each(staged, "background", "files", "same", "extra", "loaded", "seen")
    assert files >= 3, staged.log
    assert found == [True, [], True, 2], staged.log


def test_each_second_checkpoint_goes_to_storage_over_a_relaunch_too(staged: Result) -> None:
    disk = ["again", "global_step2", "global_step4", "global_step7", "of 6"]  # from 7 on all, as was asked for
    found = each(staged, "storage", "memory", "disk", "at", "same", "seen", "later")
    assert found == [([4, 5], disk, 5, True, 5, [5, 6])]


def test_what_deepspeed_raises_on_one_rank_is_raised_there_and_holds_up_no_other(once: Result) -> None:
    raised = {rank: [one["text"] for one in once.of("failed") if one["rank"] == rank] for rank in range(RANKS)}
    nothing = "nothing was raised"
    assert raised == {0: [nothing] * 3, 1: [nothing, "division by zero", nothing]}
    assert each(once, "after it", "steps") == [([1, 3],)]
    assert "step 2 was not saved: the state could not be read: ZeroDivisionError" in once.log


def test_closed_the_engine_is_as_it_was(once: Result) -> None:
    found = each(once, "closed", "written", "left", "engine", "nothing", "leftovers")
    assert found == [([False, True], [], "TorchCheckpointEngine", [None, None], [])]
    assert each(once, "closed", "text") == [("this Checkpointer was closed",)]


def test_engines_whose_ranks_share_out_files_are_refused(once: Result) -> None:
    for record in once.of("refused"):
        for text, expected in zip(
            record["texts"],
            ("1 or more", "pipeline", "experts", "state is on NVMe", "parameters are on NVMe", "elastic_checkpoint"),
            strict=True,
        ):
            assert expected in text


def test_tensor_parallel_ranks_get_their_own_parts(once: Result) -> None:
    assert each(once, "parallel", "of", "step", "same") == [(2, 2, True)]


def test_an_engine_of_another_kind_is_refused(once: Result) -> None:
    texts = [record["text"] for record in once.of("other stage")]
    assert ["ZeRO stage or precision" in text for text in texts] == [True, True, True, False] * RANKS, texts
    assert all("not saved through mlflash.adapters.deepspeed" in text for text in texts[3::4])


def test_an_engine_is_part_of_any_state(once: Result) -> None:
    assert each(once, "in a state", "same", "seen", "shares") == [(True, True, True)] * 2, once.log


def test_what_all_ranks_hold_is_stored_once_and_another_number_of_ranks_is_refused(shm: Path) -> None:
    cluster, stages = Cluster(shm), ("zero0", "zero1", "zero3")
    saved = run_all(cluster, [(stage, "save_shared") for stage in stages])
    weights = [f"module.{number}.{name}" for number in (0, 2) for name in ("weight", "bias")]
    moments = [f"optimizer.state.{i}.{name}" for i in range(4) for name in ("exp_avg", "exp_avg_sq", "step")]
    for stage, names in zip(stages, ([*weights, *moments], weights, []), strict=True):
        found = [one["shared"] for one in saved.of("saved") if one["stage"] == stage]
        expected = sorted(f"engine.files.tree.mp_rank_00_model_states.pt.{name}" for name in names)
        assert [sorted(one) for one in found] == [expected] * RANKS, saved.log
        shutil.rmtree(shm / "node1" / f"mlflash-{UID}" / f"shared-{stage}")
    assert each(saved, "not shared", "shared") == [([],)] * len(stages)
    loaded = run_all(cluster, [(stage, "load_shared") for stage in stages])
    assert each(loaded, "loaded", "step") == [(2,)] * len(stages), loaded.log
    assert [one["whole"] for one in loaded.of("loaded")] == [one["whole"] for one in saved.of("saved")]
    alone = run_all(cluster, [("zero1", "other_ranks")], ranks=1)
    for record in alone.of("other ranks"):
        assert "ds_to_universal.py" in record["text"] and "2 ranks\n" in record["text"], record
    assert [record["step"] for record in alone.of("from disk")] == [3]
