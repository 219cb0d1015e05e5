"""Values that no training goes on from: they are found while they are saved, and what was good is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import on_node
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.errors import StepNotFound, SuspectState

pytestmark = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def state_at(step: int, bad: float | None = None) -> dict[str, Any]:
    """The state after a step; on rank 1 one value of it may be another one."""
    weights = np.random.default_rng((RANK, step)).standard_normal(30_000).astype(np.float32)
    if bad is not None and RANK == 1:
        weights[12_345] = bad
    return {"model": {"w": weights, "attention_mask": np.full(20, -np.inf)}, "step": step}


@pytest.fixture
def options(root: Path) -> dict[str, Any]:
    """Settings of a Checkpointer on nodes of one rank each; the scheme follows from their number."""
    redundancy = {1: "none", 3: "xor:3", 5: "none"}.get(SIZE, "copy")
    return {"job": "t", **on_node(root), "transport": "p2p", "timeout_s": 30.0,
            "redundancy": redundancy}  # fmt: skip


def save(ckpt: Checkpointer, step: int, bad: float | None = None) -> None:
    ckpt.save(step, state_at(step, bad)).wait()


def restored(options: dict[str, Any], **wanted: Any) -> int | None:
    """Restore in a new Checkpointer, and see that each bit is right; gives the step."""
    with Checkpointer(**options) as ckpt:
        state = state_at(0)
        step = ckpt.restore(state, **wanted)
        whole = step is not None and np.array_equal(state["model"]["w"], state_at(step)["model"]["w"])
        assert whole or step is None, step
    return step


def of_rank_1(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "are suspect" in text]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_suspect_is_a_warning_that_names_the_tensor_and_the_next_step_is_none(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    with Checkpointer(**options) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2, bad)
        save(ckpt, 3)
        assert ckpt.report()["counts"].get("suspect", 0) == (RANK == 1)
    assert [("step 2" in text, "model.w" in text) for text in of_rank_1(caplog)] == [(True, True)] * (RANK == 1)
    assert restored(options) == 3


def test_raise_lets_the_save_fail_on_all_ranks_and_keeps_the_step_before(options: dict[str, Any]) -> None:
    options["on_suspect"] = "raise"
    with Checkpointer(**options) as ckpt:
        save(ckpt, 1)
        with pytest.raises(SuspectState, match=r"1 of 30,000 values of model\.w are NaN"):
            save(ckpt, 2, np.nan)
        with pytest.raises(SuspectState):
            ckpt.wait()
    assert restored(options) == 1


@pytest.mark.slow
def test_keep_keeps_the_good_step_through_any_number_of_suspect_ones(options: dict[str, Any]) -> None:
    options["on_suspect"] = "keep"
    with Checkpointer(**options) as ckpt:
        save(ckpt, 1)
        for step in range(2, 6):
            save(ckpt, step, np.nan)
    assert restored(options) == 1
    with Checkpointer(**options) as ckpt:
        ckpt.restore(state_at(0))
        for step, bad in ((2, None), (3, np.nan), (4, np.nan)):
            save(ckpt, step, bad)
    assert restored(options) == 2
    with Checkpointer(**options) as ckpt:
        ckpt.restore(state_at(0))
        save(ckpt, 5)
    assert restored(options) == 5


def test_without_keep_the_newest_is_restored_and_said_to_be_suspect(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(**options) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2, np.nan)
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state_at(0)) == 2
        warnings = [text for text in caplog.messages if "restore(before=2)" in text]
        assert len(warnings) == (RANK == 0)
        state = state_at(0)
        assert ckpt.restore(state, before=2) == 1 and np.array_equal(state["model"]["w"], state_at(1)["model"]["w"])
        with pytest.raises(StepNotFound, match="before step 1"):
            ckpt.restore(state_at(0), before=1)
        with pytest.raises(ValueError, match="or before= and certified="):
            ckpt.restore(state_at(0), 2, before=2)


def test_a_step_is_certified_by_the_next_one_that_is_good_and_held_beside_the_newest(options: dict[str, Any]) -> None:
    options["certify_after"] = 1
    with Checkpointer(**options) as ckpt:
        save(ckpt, 1)
        with pytest.raises(StepNotFound, match="there is no step that is certified"):
            ckpt.restore(state_at(0), certified=True)
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state_at(0)) == 1
        save(ckpt, 2)
        for step in range(3, 7):
            save(ckpt, step, np.nan)
    for _ in range(2):
        assert restored(options, certified=True) == 1


def test_steps_that_certify_may_be_several_saves_apart(options: dict[str, Any]) -> None:
    options["certify_after"] = 3
    with Checkpointer(**options) as ckpt:
        for step in range(1, 10):
            save(ckpt, step)
        # 1 is tried and certified at 4, 4 at 7 (which begins with 5: the one before that is 4), and 7 is being tried
        slots = [slot["step"] for slot in ckpt.report()["slots"] if slot["what"] == "own"]
        assert len(slots) == 4
    assert restored(options, certified=True) == 4
    assert restored(options | {"prefer_certified": True}) == 4
    assert restored(options, before=9) in (4, 5, 6, 7, 8)


def test_what_is_tried_and_holds_nan_where_its_save_did_not_look_is_not_certified(options: dict[str, Any]) -> None:
    options |= {"certify_after": 1, "check_values": 0.01}
    suspects = []
    big = np.ones(9_000_000, dtype=np.float32)  # 35 stretches, of which a save looks at every other one
    with Checkpointer(**options) as ckpt:
        for step in range(1, 5):
            big[0] = np.nan if step == 3 and RANK == 1 else 1.0
            ckpt.save(step, {"big": big}).wait()
            ckpt.steps()  # comes after what a save leaves behind
            suspects.append(ckpt.report()["counts"].get("suspect", 0))
    assert suspects == [0, 0, 0, int(RANK == 1)], "it is found when it is tried"
    with Checkpointer(**options) as ckpt:
        assert ckpt.load(certified=True)[0] == 2


def test_who_marks_a_step_as_bad_gets_the_one_before_from_then_on(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2)
        ckpt.mark_bad(2)
        with pytest.raises(StepNotFound):
            ckpt.mark_bad(7)
    assert restored(options, step=2) == 2, "it is there still, for who asks for it"
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state_at(0)) in (1, 2)
    with Checkpointer(**options) as ckpt:
        ckpt.mark_good(2)
    assert restored(options, certified=True) == 2
