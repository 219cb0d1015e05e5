"""The step that a run goes on from: the newest of which every byte is good, found once, and not by its header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import Nodes
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.errors import StepNotFound, Unrestorable

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.parametrize("options", ["p2p"], indirect=True)]
RANK = MPI.COMM_WORLD.rank


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.full(30_000, step * 10 + RANK), "step": step}


@pytest.fixture
def saved(options: dict[str, Any], nodes: Nodes) -> dict[str, Any]:
    """Steps 3 and 5 are in memory, and 5 is damaged in slot and copy."""
    with Checkpointer(**options) as ckpt:
        for step in (3, 5):
            ckpt.save(step, state_at(step)).wait()
    nodes.damage(5)
    return options


def test_a_step_that_is_damaged_beyond_repair_is_not_the_newest(saved: dict[str, Any]) -> None:
    for find in ("newest_step", "newest_alike"):
        with Checkpointer(**saved) as ckpt:
            assert ckpt.steps() == [3, 5], "headers say what was saved"
            assert getattr(ckpt.adapting, find)() == 3
            opened = ckpt.adapting.open()
            assert opened is not None and opened.step == 3
            opened.close()
            with pytest.raises(StepNotFound):
                ckpt.adapting.open(5)
            state = state_at(0)
            assert ckpt.restore(state, 3) == 3 and (state["w"] == 30 + RANK).all()


def test_the_newest_is_what_was_saved_last_and_not_what_has_the_largest_step(options: dict[str, Any]) -> None:
    with Checkpointer(**options) as ckpt:
        assert ckpt.adapting.newest_step() is None
        for step in (4, 8):
            ckpt.save(step, state_at(step)).wait()
        assert ckpt.adapting.newest_step() == 8
    with Checkpointer(**options) as ckpt:  # training goes back to step 4
        state = state_at(0)
        assert ckpt.restore(state, 4) == 4
        ckpt.save(5, state_at(5)).wait()
        assert ckpt.adapting.newest_step() == 5
        assert ckpt.restore(state) == 5 and state["step"] == 5


def test_what_was_verified_before_a_save_is_verified_again_after_it(options: dict[str, Any], nodes: Nodes) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(3, state_at(3)).wait()
        assert ckpt.adapting.newest_step() == 3
        for step in (5, 7):  # over the slot that was verified
            ckpt.save(step, state_at(step)).wait()
        nodes.damage(7)
        newest, state = ckpt.load()
        assert newest == 5 and (state["w"] == 50 + RANK).all()


def test_a_damaged_checkpoint_of_the_directory_is_passed_over_when_a_step_is_chosen(
    options: dict[str, Any], nodes: Nodes, root: Path
) -> None:
    more = {**options, "directory": root / "pfs"}
    with Checkpointer(**more, drain_every=1) as ckpt:
        for step in (3, 5):
            ckpt.save(step, state_at(step)).wait()
            ckpt.wait_drained()
    nodes.lose(*range(MPI.COMM_WORLD.size))

    def spoil() -> None:
        largest = max((root / "pfs" / "step-00000005").iterdir(), key=lambda path: path.stat().st_size)
        raw = bytearray(largest.read_bytes())
        raw[-8] ^= 1  # of the tensor, and not of the object that PyTorch reads
        largest.write_bytes(raw)

    nodes.on_rank_0(spoil)
    for find in ("newest_step", "newest_alike"):
        with Checkpointer(**more) as ckpt:
            assert ckpt.steps() == [3, 5] and getattr(ckpt.adapting, find)() == 3
            opened = ckpt.adapting.open()
            assert opened is not None and opened.step == 3
            opened.close()
            assert ckpt.load(3)[0] == 3


def test_where_none_can_be_loaded_that_is_raised_with_each_reason_or_said_where_there_is_something_else(
    saved: dict[str, Any], nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.damage(3)
    with Checkpointer(**saved) as ckpt:
        with pytest.raises(Unrestorable, match=r"(?s)step 3: .*step 5: ") as caught:
            ckpt.adapting.newest_alike()
        assert sorted(caught.value.reasons) == [3, 5]
        assert ckpt.adapting.newest_alike("step 2 on disk") is None
        assert ("continuing from step 2 on disk, because no checkpoint" in caplog.text) == (RANK == 0)
