"""What frameworks' callbacks need of a Checkpointer besides its verbs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from holds import Hold
from mpi4py import MPI

from mlflash import Checkpointer, errors

pytestmark = pytest.mark.mpi
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def state_at(step: int, bad_rank: int | None = None) -> dict[str, Any]:
    return {"w": np.full(1000, step), "more": object() if bad_rank == RANK else step}


def test_what_one_rank_cannot_save_is_a_warning_and_the_next_step_is_saved(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.adapting.save_or_warn(1, state_at(1))
        snapshot = ckpt.adapting.save_or_warn(2, state_at(2, bad_rank=SIZE - 1))
        assert (snapshot is None) == (RANK == SIZE - 1)
        ckpt.wait()
        assert ckpt.steps() == [1]
        assert ("step 2 was not saved" in caplog.text) == (RANK in (0, SIZE - 1))
        assert ckpt.adapting.save_or_warn(2, state_at(2)) is None  # the step does not grow
        ckpt.adapting.save_or_warn(3, state_at(3))
        ckpt.wait()
        assert ckpt.steps() == [1, 3]


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
        assert ckpt.restore(state) == 5 and state["more"] == 5


def test_what_an_adapters_optimizers_hold_is_copied_later_until_something_else_has_changed_it(
    options: dict[str, Any], hold_at: Callable[[str], Hold], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlflash")
    layer = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    state = {"layer": layer}
    with Checkpointer(**options) as ckpt:
        ckpt.prepare(state)
        hold = hold_at("commit.seen")  # the courier is busy for as long as the test says, once the first save has ended
        ckpt.adapting.save_or_warn(1, state, [optimizer]).wait()  # type: ignore[union-attr]
        optimizer.step()  # heard of from now on
        for step in (2, 3):
            snapshot = ckpt.adapting.save_or_warn(step, state, [optimizer])
            assert snapshot is not None and snapshot.later is not None
            if step == 2:
                ckpt.adapting.wait_staged()  # as an adapter does before its framework changes the weights
            with torch.no_grad():
                layer.weight.mul_(2)
            if step == 2:
                hold.set()
                snapshot.wait()
                hold = hold_at("protect.announced")
        hold.set()
        with pytest.raises(errors.SaveFailed, match="changed before it was copied"):
            snapshot.wait()
        assert ckpt.steps() == [2]  # the third was begun in the slot of the first
        last = ckpt.adapting.save_or_warn(4, state, [optimizer])
        assert last is not None and last.later is None
        last.wait()
        assert ckpt.adapting.save_or_warn(5, state, "it is gathered in forward").later is None  # type: ignore[union-attr]
    said = [text for text in caplog.messages if "and not while training continues" in text]
    assert len(said) == (2 if RANK == 0 else 0)


def test_where_it_is_turned_off_all_is_copied_at_once(options: dict[str, Any]) -> None:
    layer = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Checkpointer(**options, lazy=False) as ckpt:
        assert ckpt.adapting.save_or_warn(1, {"layer": layer}, [optimizer]).later is None  # type: ignore[union-attr]
        assert ckpt.save(2, {"layer": layer}, until=optimizer).later is None
